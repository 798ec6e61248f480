"""Does something on the way to a loss compute in fewer bits than float64, whatever it is given?

Its steps look like a wrong gradient. The graph says so of what autograd sees; what a hand-written function
does inside shows in its casts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftlab.arithmetic.kinks import nodes
from driftlab.network.compiled import DispatchMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
_WIDE = (torch.float64, torch.complex128)


def narrow_dtype(forward: Callable[[], Tensor]) -> torch.dtype | None:
    """The first narrower dtype on the way to the loss that ``forward`` computes; None where there is none."""
    with _Casts() as casts:
        loss = forward()
    in_graph = (g.dtype for node in nodes(loss.grad_fn) for g in getattr(node, "_input_metadata", ()))
    return next((dtype for dtype in in_graph if dtype in _NARROW), casts.found)


class _Casts(DispatchMode):
    """Notes the dtype of the first cast from double precision to less."""

    def __init__(self):
        super().__init__()
        self.found: torch.dtype | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        source = {"aten::_to_copy": 0, "aten::copy_": 1}.get(func._schema.name)
        if source is not None and self.found is None and args[source].dtype in _WIDE and out.dtype in _NARROW:
            self.found = out.dtype
        return out
