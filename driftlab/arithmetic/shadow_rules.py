"""Operations that shadow execution treats by themselves: see ``driftlab.arithmetic.shadow``."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

# Rounding to a grid is the identity here: fake quantisation is precision, not function.
ROUND = (_aten.round.default, _aten.round.decimals)
ROUND_IN_PLACE = (_aten.round_.default, _aten.round_.decimals)
GRIDS = (
    *ROUND,
    _aten.fake_quantize_per_tensor_affine_cachemask.default,
    _aten.fake_quantize_per_channel_affine_cachemask.default,
)
# torch's own kernel holds its 1/6 in float32, in float64 too.
EXACT = {
    _aten.hardsigmoid_backward.default: lambda g, x: torch.where(
        (x > -3) & (x < 3), g / 6, torch.zeros_like(g)
    ),
}
BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "__rshift__", "__lshift__", "__and__", "__or__"}
BITWISE |= {f"{name}_" for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "add", "sub")}
BITWISE |= {"bitwise_left_shift", "bitwise_right_shift", "add", "sub", "detach", "alias", "clone"}
# Half of the coarsest step in use (eight bits): what moves a value by more has done something else to it.
ROUNDED = 2.0**-5


def is_view(func) -> bool:
    """Whether what an operation returns lies in the memory of an argument, and nothing is written."""
    returned = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)
