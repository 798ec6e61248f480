"""The tensor of shadow execution, and how an operation runs on it: see ``driftlab.shadow``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WIDE = {torch.float64: torch.float64, torch.complex128: torch.complex128, torch.complex64: torch.complex128}
HALVES = (torch.float32, torch.float16, torch.bfloat16)
WIDE |= dict.fromkeys(HALVES, torch.float64)
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
        return run_operation(func, args, kwargs or {})


# Rounding to a grid is the identity here: fake quantisation is precision, not function.
_GRIDS = {
    _aten.round.default: lambda t, *_, **__: t,
    _aten.round.decimals: lambda t, *_, **__: t,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: lambda t, *_, **__: (
        t,
        torch.ones_like(t, dtype=torch.bool),
    ),
}
# torch's own kernel holds its 1/6 in float32, in float64 too.
_EXACT = {
    _aten.hardsigmoid_backward.default: lambda g, x: torch.where(
        (x > -3) & (x < 3), g / 6, torch.zeros_like(g)
    ),
}
_BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "__rshift__", "__lshift__", "__and__", "__or__"}
_BITWISE |= {"bitwise_left_shift", "bitwise_right_shift", "add", "sub"}


class Bits(Tensor):
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
        return f"Bits({self.bits!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})


def run_operation(func, args: tuple, kwargs: dict):
    if func in _GRIDS and isinstance(args[0], Tensor):
        return _rounded(func, args)
    if func is _aten.view.dtype and isinstance(args[0], Shadow | Bits):
        return _reinterpreted(args[0], args[1])
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, Bits) for leaf in leaves):
        return _on_bits(func, leaves, spec)
    said = _said(leaves, kwargs)
    inner = [_inner(leaf, func) for leaf in leaves]
    args_in, kwargs_in = _rebuilt(inner, spec)
    out = _EXACT.get(func, func)(*args_in, **kwargs_in)
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
    if isinstance(leaf, Tensor) and leaf.dtype in WIDE:
        return leaf.to(WIDE[leaf.dtype])
    if isinstance(leaf, torch.dtype):
        return WIDE.get(leaf, leaf)
    return leaf


def _written_back(leaves: list, inner: list) -> None:
    """A plain tensor that an operation changed in place was replaced by a wider one: give it the values."""
    for leaf, wide in zip(leaves, inner, strict=True):
        if isinstance(leaf, Tensor) and not isinstance(leaf, Shadow) and wide is not leaf and wide._version:
            leaf.copy_(wide)


def _said(leaves: list, kwargs: dict) -> torch.dtype:
    """The dtype that results say they have: what was asked for, else the promoted one of the arguments."""
    asked = [leaf for leaf in leaves if isinstance(leaf, torch.dtype) and leaf in WIDE]
    if asked:
        return asked[-1]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in WIDE]
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
    if tensor.dtype not in WIDE or isinstance(tensor, Shadow):
        return tensor
    wide = tensor.to(WIDE[tensor.dtype])
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


def _reinterpreted(tensor: Shadow | Bits, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, Bits):
        if dtype.is_floating_point:
            return Shadow(tensor.source.held.clone(), dtype)
        return tensor
    if dtype.is_floating_point:
        return Shadow(tensor.held.clone(), dtype)
    return Bits(tensor.held.to(tensor.dtype).view(dtype), tensor)


def _on_bits(func, leaves: list, spec):
    source = next(leaf.source for leaf in leaves if isinstance(leaf, Bits))
    plain = [leaf.bits if isinstance(leaf, Bits) else leaf for leaf in leaves]
    args, kwargs = _rebuilt(plain, spec)
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and func._opname.rstrip("_") in _BITWISE and out.shape == source.shape:
        return Bits(out, source)
    return out
