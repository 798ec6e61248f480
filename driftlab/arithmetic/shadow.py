"""Shadow execution: a network's own code path for a dtype, with the arithmetic done in float64.

A tensor here says that it is float32 (or bfloat16, whatever the code makes it) and holds float64. A cast
changes what it says, never what it holds; so does rounding to a grid. What two networks still differ by
is then no rounding: it is their function. Shadow values of this kind find accuracy faults in programs at
large (Benz, Hildebrandt, Hack, "A dynamic program analysis to find floating-point accuracy problems",
PLDI 2012).

Forward and backward run through it alike. What it cannot follow (a kernel that torch does not dispatch, a
trip through numpy) raises, or leaves the rounding of that piece in the result.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.arithmetic.shadow_tensor import HALVES, WIDE, Bits, Native, Shadow, is_view, run_operation
from driftlab.arithmetic.units import by_one_unit
from driftlab.network.calling import carry_hooks, copied
from driftlab.network.compiled import DispatchMode, eager
from driftlab.process import on_purpose


class _Arithmetic(DispatchMode):
    """So that tensors made on the way (zeros, arange, constants) are held in float64 too.

    Args:
        nudge: draws the directions in which plain tensors are moved by one unit in their last place.
    """

    def __init__(self, nudge: torch.Generator | None = None):
        super().__init__()
        self.nudge = nudge

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.nudge is not None and not func._schema.is_mutable and not is_view(func):
            args, kwargs = pytree.tree_map_only(Tensor, self._nudged, (args, kwargs or {}))
        return run_operation(func, args, kwargs or {})

    def _nudged(self, tensor: Tensor) -> Tensor:
        """Whatever is no shadow is a constant that the code stored or wrote down."""
        if isinstance(tensor, Shadow | Bits) or tensor.dtype not in HALVES:
            return tensor
        return by_one_unit(tensor, self.nudge)


@contextmanager
def shadow_arithmetic(nudge: torch.Generator | None = None, native: Native = Native.NOTHING):
    """Inside, every operation runs in float64; compiled code runs as it was written.

    Args:
        nudge: if given, every constant that is no parameter or buffer is moved by one unit in its last place.
        native: what is made in the code's own dtype.
    """
    with ExitStack() as stack:
        stack.enter_context(_chosen_for_float64())
        stack.enter_context(eager())
        stack.enter_context(_Arithmetic(nudge))
        before, Shadow.native = Shadow.native, native
        stack.callback(setattr, Shadow, "native", before)
        yield


@contextmanager
def _chosen_for_float64():
    """Some kernels torch chooses by what a tensor says, before anybody sees the call; not all know float64.

    Without oneDNN and cuDNN it makes recurrent layers, norms and sampling on grids of kernels that do, and
    attention where it may choose the mathematical form alone.
    """
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        with on_purpose(sdpa_kernel(SDPBackend.MATH)):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


def shadowed(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with its floating parameters and buffers held in float64; ties are kept."""
    twin, made = copied(module), {}
    for part in twin.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.dtype in WIDE:
                    table[name] = made.setdefault(id(tensor), _leaf(tensor))
                    carry_hooks(tensor, table[name])
        _flatten_again(part)
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # which is how a gradient is stored; no shadow is sparse
    return twin


def _leaf(tensor: Tensor) -> Shadow:
    with _disable_current_modes():
        values = tensor.held if isinstance(tensor, Shadow) else tensor.detach().to(WIDE[tensor.dtype])
        leaf = Shadow(values.clone(), tensor.dtype, tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        leaf._is_param = True
    return leaf


def _flatten_again(module: nn.Module) -> None:
    """A recurrent layer keeps a second list of its weights."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def shadow(values: object) -> object:
    """The floating tensors of a batch as shadows of themselves; leaves that need a gradient stay leaves."""
    return pytree.tree_map_only(Tensor, lambda t: _leaf(t) if t.dtype in WIDE else t, values)


def held(values: object) -> object:
    """What shadows hold, float64, detached; other tensors as they are."""
    return pytree.tree_map_only(Shadow, lambda t: t.held.detach(), values)


def plain(tensor: Tensor) -> Tensor:
    """Its numbers in float64, outside any arithmetic."""
    return held(tensor).detach().double()
