"""Every operation on tensors whose numbers lie in memory in their usual order; how many numbers there are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from driftlab.network.calling import each_tensor, tensors_in
from driftlab.network.compiled import DispatchMode


class UsualLayout(DispatchMode):
    """Inside, what an operation reads is laid out anew, row by row, where it is not.

    What it computes must not depend on that, but for the order of its sums. Operations that write into what
    they are given, or return a part of it, are given the tensor itself.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        if not any(one.alias_info for one in (*schema.arguments, *schema.returns)):
            args, kwargs = each_tensor(_laid_out, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Counted(DispatchMode):
    """Counts the ``numbers`` that all operations inside give."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers += sum(t.numel() for t in tensors_in(out))
        return out


def _laid_out(tensor: Tensor) -> Tensor:
    strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not strided or tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
