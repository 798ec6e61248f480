"""Networks and inputs in double precision: what a loss is differentiated by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.network.calling import carry_hooks, copied
from driftlab.words import DiagnoseError

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def widened_copy(module: nn.Module) -> nn.Module:
    """A copy in double precision. Raises DiagnoseError where it does not let itself be copied."""
    try:
        return _widened(copied(module))
    except DiagnoseError:
        raise
    except Exception as error:  # whatever a stranger's copying raises
        raise DiagnoseError(
            f"the network cannot be copied ({type(error).__name__}: {' '.join(str(error).split())[:110]}): "
            "make prunings permanent with prune.remove, take weight norms from nn.utils.parametrizations"
        ) from error


def _widened(module: nn.Module) -> nn.Module:
    """Floating and complex tensors in double precision, in place; ties and hooks are kept."""
    module.double()
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.dtype in _WIDE:
                    table[name] = made.setdefault(id(tensor), _as_complex128(tensor))
    return module


def _as_complex128(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to(torch.complex128)
    if isinstance(tensor, nn.Parameter):
        wide = nn.Parameter(wide, tensor.requires_grad)
        carry_hooks(tensor, wide)
    return wide


def input_leaves(inputs: object, taken: Mapping[str, Tensor]) -> tuple[object, dict[str, Tensor]]:
    """The inputs in float64, and those that are differentiated by, under names that are not ``taken``."""
    tensors, spec = pytree.tree_flatten_with_path(inputs)
    chosen = any(isinstance(t, Tensor) and t.requires_grad for _, t in tensors)
    wide, named = [], {}
    for path, tensor in tensors:
        if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            own = tensor.detach().to(
                _WIDE.get(tensor.dtype, torch.promote_types(tensor.dtype, torch.float64))
            )
            own = own.clone(memory_format=torch.contiguous_format)  # an expanded one shares its numbers
            if tensor.requires_grad or not chosen:
                name = ".".join(["input", *(str(getattr(p, "idx", getattr(p, "key", p))) for p in path)])
                named[f"({name})" if name in taken else name] = own.requires_grad_()
            tensor = own
        wide.append(tensor)
    return pytree.tree_unflatten(wide, spec), named
