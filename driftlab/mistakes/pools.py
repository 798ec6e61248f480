"""A pooling by the mean that should be by the maximum, or the other way round; a border that is counted.

Or a last window that reaches beyond the border, or is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

_MEAN, _MAXIMUM = "the mean, not the maximum,", "the maximum, not the mean,"


def pooled_otherwise(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of a window, of a whole, or along some dimensions."""
    if not call.tensors:
        return
    x, kind, dims = call.tensors[0], call.name[:-2], call.name[-2:]
    if kind in ("adaptive_avg_pool", "adaptive_max_pool"):
        maximum = kind == "adaptive_max_pool"
        other = getattr(F, f"adaptive_{'avg' if maximum else 'max'}_pool{dims}")
        yield _said(maximum, call), lambda: other(x, call.argument(1, "output_size"))
    elif call.name in ("mean", "amax"):
        other = x.amax if call.name == "mean" else x.mean
        dim, keep = call.argument(1, "dim", ()), call.argument(2, "keepdim", False)
        yield _said(call.name == "amax", call), lambda: other(dim=dim, keepdim=keep)
    elif kind in ("avg_pool", "max_pool"):
        yield from _windows(call, x, dims)


def _windows(call: Call, x: Tensor, dims: str) -> Iterator[Mutation]:
    maximum = call.name.startswith("max")
    names = ("kernel_size", "stride", "padding")
    own = {name: call.argument(place, name) for place, name in enumerate(names, 1)}
    window: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    window["ceil_mode"] = call.argument(5 if maximum else 4, "ceil_mode", False)
    mean, most = getattr(F, f"avg_pool{dims}"), getattr(F, f"max_pool{dims}")
    dilation, counted = call.argument(4, "dilation", 1), call.argument(5, "count_include_pad", True)
    same = partial(most, dilation=dilation) if maximum else partial(mean, count_include_pad=counted)
    ends, beyond = ("not ", False) if window["ceil_mode"] else ("", True)
    words = f"a last window of `{call.name}` that reaches {ends}beyond the border"
    yield words, lambda: same(x, **{**window, "ceil_mode": beyond})
    if maximum and dilation == 1:
        yield _said(True, call), lambda: mean(x, **window)
    if not maximum:
        words = f"a border that `{call.name}` {'does not count' if counted else 'counts'}"
        yield words, lambda: mean(x, **window, count_include_pad=not counted)
        yield _said(False, call), lambda: most(x, **window)
    elif own["padding"]:
        words = f"{_said(True, call)} without the border"
        yield words, lambda: mean(x, **window, count_include_pad=False)


def _said(maximum: bool, call: Call) -> str:
    return f"{_MEAN if maximum else _MAXIMUM} by `{call.name}`"
