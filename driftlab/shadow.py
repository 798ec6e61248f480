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

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_WIDE = {torch.float64: torch.float64, torch.complex128: torch.complex128, torch.complex64: torch.complex128}
_HALVES = (torch.float32, torch.float16, torch.bfloat16)
_WIDE |= dict.fromkeys(_HALVES, torch.float64)
_aten = torch.ops.aten


class Shadow(Tensor):
    """A tensor of dtype ``dtype`` by its own account, whose values are those of ``held``, in float64."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=dtype,
            device=held.device,
            requires_grad=requires_grad,
        )

    def __init__(self, held: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        self.held = held

    def __repr__(self) -> str:
        return f"Shadow({self.dtype}, {self.held!r})"

    def __deepcopy__(self, memo: dict) -> Shadow:
        return Shadow(self.held.clone(), self.dtype, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Arithmetic(TorchDispatchMode):
    """So that tensors made on the way (zeros, arange, constants) are held in float64 too.

    Args:
        nudge: draws the directions in which plain tensors are moved by one unit in their last place.
    """

    def __init__(self, nudge: torch.Generator | None = None):
        super().__init__()
        self.nudge = nudge

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import it first: two seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.nudge is not None and func not in _IN_PLACE_COPIES:
            args, kwargs = pytree.tree_map_only(Tensor, self._nudged, (args, kwargs or {}))
        return _run(func, args, kwargs or {})

    def _nudged(self, tensor: Tensor) -> Tensor:
        """Whatever is no shadow is a constant that the code stored or wrote down."""
        if isinstance(tensor, Shadow | _Bits) or tensor.dtype not in _HALVES:
            return tensor
        up = torch.rand(tensor.shape, generator=self.nudge).to(tensor.device) < 0.5
        infinite = torch.full_like(tensor, torch.inf)
        return torch.nextafter(tensor, torch.where(up, infinite, -infinite))


@contextmanager
def shadow_arithmetic(nudge: torch.Generator | None = None):
    """Inside, every operation runs in float64; compiled code runs as it was written.

    Args:
        nudge: if given, every constant that is no parameter or buffer is moved by one unit in its last place.
    """
    with ExitStack() as stack:
        # its recurrent kernels know float32 alone; without it they are made of plain operations
        stack.enter_context(_without_mkldnn())
        stack.enter_context(_eager())
        stack.enter_context(_Arithmetic(nudge))
        yield


@contextmanager
def _without_mkldnn():
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _eager():
    compiled = "torch._dynamo" in sys.modules  # which takes seconds to import, and nobody compiled without it
    return torch.compiler.set_stance("force_eager") if compiled else ExitStack()


def shadowed(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with its floating parameters and buffers held in float64; ties are kept."""
    twin, made = copy.deepcopy(module), {}
    for part in twin.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.dtype in _WIDE:
                    table[name] = made.setdefault(id(tensor), _leaf(tensor))
        _flatten_again(part)
    return twin


def _leaf(tensor: Tensor) -> Shadow:
    with _disable_current_modes():
        values = tensor.held if isinstance(tensor, Shadow) else tensor.detach().to(_WIDE[tensor.dtype])
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
    return pytree.tree_map_only(Tensor, lambda t: _leaf(t) if t.dtype in _WIDE else t, values)


def held(values: object) -> object:
    """What shadows hold, float64, detached; other tensors as they are."""
    return pytree.tree_map_only(Shadow, lambda t: t.held.detach(), values)


_IN_PLACE_COPIES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.zero_.default}
# Rounding to a grid is the identity here: fake quantisation is precision, not function.
_GRIDS = {
    _aten.round.default: lambda t, *_, **__: t,
    _aten.round.decimals: lambda t, *_, **__: t,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: lambda t, *_, **__: (
        t,
        torch.ones_like(t, dtype=torch.bool),
    ),
}
_BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "__rshift__", "__lshift__", "__and__", "__or__"}
_BITWISE |= {"bitwise_left_shift", "bitwise_right_shift", "add", "sub"}


class _Bits(Tensor):
    """The integer view of a shadow's bits, on its way to lose some of them; it keeps the shadow."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, bits: Tensor, source: Shadow):
        return torch.Tensor._make_wrapper_subclass(
            cls, bits.size(), strides=bits.stride(), dtype=bits.dtype, device=bits.device
        )

    def __init__(self, bits: Tensor, source: Shadow):
        self.bits, self.source = bits, source

    def __repr__(self) -> str:
        return f"_Bits({self.bits!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args: tuple, kwargs: dict):
    if func in _GRIDS and isinstance(args[0], Tensor):
        return _rounded(func, args)
    if func is _aten.view.dtype and isinstance(args[0], Shadow | _Bits):
        return _reinterpreted(args[0], args[1])
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, _Bits) for leaf in leaves):
        return _on_bits(func, leaves, spec)
    said = _said(leaves, kwargs)
    inner = [_inner(leaf, func) for leaf in leaves]
    out = func(*_rebuilt(inner, spec)[0], **_rebuilt(inner, spec)[1])
    if func is _aten._to_copy.default and isinstance(args[0], Shadow):
        # a cast that changes the name only must still be a tensor of its own
        out = out.clone() if out is args[0].held else out
    _written_back(leaves, inner)
    known = {id(i): leaf for i, leaf in zip(inner, leaves, strict=True) if isinstance(leaf, Shadow)}
    return pytree.tree_map_only(Tensor, lambda t: _named(t, known, said), out)


def _rebuilt(leaves: list, spec) -> tuple:
    return pytree.tree_unflatten(leaves, spec)


def _inner(leaf: object, func) -> object:
    """What an operation is given in place of an argument."""
    if isinstance(leaf, Shadow):
        return leaf.held
    if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
        return leaf.to(_WIDE[leaf.dtype])
    if isinstance(leaf, torch.dtype):
        return _WIDE.get(leaf, leaf)
    return leaf


def _written_back(leaves: list, inner: list) -> None:
    """A plain tensor that an operation changed in place was replaced by a wider one: give it the values."""
    for leaf, wide in zip(leaves, inner, strict=True):
        if isinstance(leaf, Tensor) and not isinstance(leaf, Shadow) and wide is not leaf and wide._version:
            leaf.copy_(wide)


def _said(leaves: list, kwargs: dict) -> torch.dtype:
    """The dtype that results say they have: what was asked for, else the promoted one of the arguments."""
    asked = [leaf for leaf in leaves if isinstance(leaf, torch.dtype) and leaf in _WIDE]
    if asked:
        return asked[-1]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _WIDE]
    dimensioned = [t for t in tensors if t.dim()] or tensors
    if not dimensioned:
        return torch.get_default_dtype()
    said = dimensioned[0].dtype
    for tensor in dimensioned[1:]:
        said = torch.promote_types(said, tensor.dtype)
    return said


def _named(tensor: Tensor, known: dict[int, Shadow], said: torch.dtype) -> Tensor:
    if id(tensor) in known:
        return known[id(tensor)]
    if tensor.dtype not in _WIDE or isinstance(tensor, Shadow):
        return tensor
    wide = tensor.to(_WIDE[tensor.dtype])
    return Shadow(wide, _as_kind(said, wide.dtype))


def _as_kind(said: torch.dtype, held_as: torch.dtype) -> torch.dtype:
    """The real or the complex dtype of the same width as ``said``."""
    if held_as.is_complex and not said.is_complex:
        return torch.complex128 if said is torch.float64 else torch.complex64
    if said.is_complex and not held_as.is_complex:
        return torch.float64 if said is torch.complex128 else torch.float32
    return said


def _rounded(func: Callable, args: tuple):
    tensor = args[0]
    if not isinstance(tensor, Shadow):
        return func(*args)
    same = Shadow(tensor.held.clone(), tensor.dtype)
    if func in (_aten.round.default, _aten.round.decimals):
        return same
    return same, torch.ones_like(tensor.held, dtype=torch.bool)


def _reinterpreted(tensor: Shadow | _Bits, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, _Bits):
        if dtype.is_floating_point:
            return Shadow(tensor.source.held.clone(), dtype)
        return tensor
    if dtype.is_floating_point:
        return Shadow(tensor.held.clone(), dtype)
    return _Bits(tensor.held.to(tensor.dtype).view(dtype), tensor)


def _on_bits(func, leaves: list, spec):
    source = next(leaf.source for leaf in leaves if isinstance(leaf, _Bits))
    plain = [leaf.bits if isinstance(leaf, _Bits) else leaf for leaf in leaves]
    args, kwargs = _rebuilt(plain, spec)
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and func._opname.rstrip("_") in _BITWISE and out.shape == source.shape:
        return _Bits(out, source)
    return out
