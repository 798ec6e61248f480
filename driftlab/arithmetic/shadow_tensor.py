"""The tensor of shadow execution, and how an operation runs on it: see ``driftlab.arithmetic.shadow``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag, auto

import torch
from torch import Tensor

from driftlab.arithmetic.draws import DRAWING, drawn
from driftlab.arithmetic.softplus import softplus, softplus_backward
from driftlab.arithmetic.written_numbers import as_written, in_float32, table_as_written
from driftlab.process.cuda_kernels import hard_sigmoid_backward

WIDE = {torch.float64: torch.float64, torch.complex128: torch.complex128, torch.complex64: torch.complex128}
HALVES = (torch.float32, torch.float16, torch.bfloat16)
WIDE |= dict.fromkeys(HALVES, torch.float64)
_aten = torch.ops.aten

# Rounding to a grid is the identity here, unless it is kept: fake quantisation is precision, not function.
_ROUND = (_aten.round.default, _aten.round.decimals)
_ROUND_IN_PLACE = (_aten.round_.default, _aten.round_.decimals)
_GRIDS = (
    *_ROUND,
    _aten.fake_quantize_per_tensor_affine_cachemask.default,
    _aten.fake_quantize_per_channel_affine_cachemask.default,
)
# What torch's own kernels compute for float32, in float64 too: the 1/6 of a hard sigmoid, a softplus's end.
_EXACT = {
    _aten.hardsigmoid_backward.default: hard_sigmoid_backward,
    _aten.softplus.default: softplus,
    _aten.softplus_backward.default: softplus_backward,
}
_BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "__rshift__", "__lshift__", "__and__", "__or__"}
_BITWISE |= {f"{name}_" for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "add", "sub")}
_BITWISE |= {"bitwise_left_shift", "bitwise_right_shift", "add", "sub", "detach", "alias", "clone"}
# Half of the coarsest step in use (eight bits): what moves a value by more has done something else to it.
_ROUNDED = 2.0**-5


class Native(Flag):
    """What of a program keeps the precision of its own dtype, because it may be stored in it."""

    NOTHING = 0
    TABLES = auto()  # what is made of constants alone
    NUMBERS = auto()  # those written down beside tensors, such as an epsilon
    GRIDS = auto()  # what is rounded to a grid


class _WithoutMemory(Tensor):
    """A tensor that wraps another, and has no memory of its own: who asks where it lies is told so.

    Kernels that torch does not dispatch take addresses (Triton's, CuPy's, extensions in C++), and torch gives
    out 0. On a GPU that ends all that the process computes there.
    """

    def data_ptr(self) -> int:
        raise NotImplementedError("no shadow execution of a kernel that is given addresses")


def _wrapping(kind: type[Tensor], size: torch.Size, **like: object) -> Tensor:
    made = torch.Tensor._make_wrapper_subclass(kind, size, **like)
    torch._C._set_throw_on_mutable_data_ptr(made)  # asked in C++
    return made


class Shadow(_WithoutMemory):
    """A tensor of dtype ``dtype`` by its own account, whose values are those of ``held``, in float64.

    Attributes:
        whole: of what was rounded, the rounded numbers: what becomes integers, as an index, is no precision.
        rounded: how many numbers were rounded to a grid by now, in all shadows together.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    native, rounded = Native.NOTHING, 0

    @staticmethod
    def __new__(cls, held: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        if held.layout is not torch.strided:  # else the shadow itself would pass for a dense one
            raise NotImplementedError(f"no shadow execution of a tensor that is {held.layout}")
        return _wrapping(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=dtype,
            device=held.device,
            requires_grad=requires_grad,
        )

    def __init__(self, held: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        self.held, self.constant = held, False
        self.whole: Tensor | None = None

    def __repr__(self) -> str:
        return f"Shadow({self.dtype}, {self.held!r})"

    def __deepcopy__(self, memo: dict) -> Shadow:
        return Shadow(self.held.clone(), self.dtype, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})


class Bits(_WithoutMemory):
    """The integer view of a shadow's bits, on its way to lose some of them; it keeps the shadow."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, bits: Tensor, source: Shadow):
        return _wrapping(cls, bits.size(), strides=bits.stride(), dtype=bits.dtype, device=bits.device)

    def __init__(self, bits: Tensor, source: Shadow):
        self.bits, self.source = bits, source

    def __repr__(self) -> str:
        return f"Bits({self.bits!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_operation(func, args, kwargs or {})


def is_view(func) -> bool:
    """Whether what an operation returns lies in the memory of an argument, and nothing is written."""
    returned = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _mapped(change: Callable, values: object):
    """``values`` with each leaf changed. Of lists, tuples and dicts alone, which is what operations take and
    give: torch's own tree_map takes most of the time of an operation on a small tensor.
    """
    if isinstance(values, list | tuple):
        return type(values)([_mapped(change, value) for value in values])
    if isinstance(values, dict):
        return {key: _mapped(change, value) for key, value in values.items()}
    return change(values)


def _leaves(*values: object) -> list:
    found: list = []
    _mapped(found.append, values)
    return found


def run_operation(func, args: tuple, kwargs: dict):
    """One operation of torch, on what shadows hold; its floating results are shadows."""
    if func in _ROUND_IN_PLACE and isinstance(args[0], Shadow):
        args[0].held.copy_(_on_grid(func, args, kwargs))
        return args[0]
    if func in _GRIDS and isinstance(args[0], Tensor):
        return _rounded(func, args, kwargs)
    if func is _aten.view.dtype and isinstance(args[0], Shadow | Bits):
        return _reinterpreted(args[0], args[1])
    if (whole := _becomes_integers(func, args, kwargs)) is not None:
        return func(whole, **kwargs)
    leaves = _leaves(args, kwargs)
    if any(isinstance(leaf, Bits) for leaf in leaves):
        return _on_bits(func, leaves, args, kwargs)
    if is_view(func) and not any(isinstance(leaf, Shadow) for leaf in leaves):
        return func(*args, **kwargs)  # of a plain tensor: what is written through it must arrive there
    if Native.TABLES in Shadow.native and _of_constants(func, leaves):
        return _natively(func, args, kwargs)
    said = _said(leaves)
    inner, named = _mapped(_inner, (args, kwargs))
    if said in HALVES and any(type(leaf) is float for leaf in leaves):
        stored = Native.NUMBERS in Shadow.native and said is torch.float32
        inner, named = _mapped(in_float32 if stored else as_written, (inner, named))
    # float64 draws other random numbers than the code's own dtype
    out = drawn(func, inner, named, said) if func in DRAWING else _computed(func, inner, named)
    if func is _aten._to_copy.default and isinstance(args[0], Shadow):
        # a cast that changes the name only must still be a tensor of its own
        out = out.clone() if out is args[0].held else out
    if torch.Tag.inplace_view in func.tags:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)  # the shadow's own shape, beside that of what it holds
    if func._schema.is_mutable:
        _written_back(func, (args, kwargs), (inner, named))
        for leaf in (leaf for leaf in leaves if isinstance(leaf, Shadow)):
            leaf.whole = None
    known = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, Shadow)}
    return _mapped(lambda t: _named(t, known, said) if isinstance(t, Tensor) else t, out)


def _of_constants(func, leaves: list) -> bool:
    """Whether an operation makes something new of no parameter, no buffer, and of the batch's integers alone.

    Positions and time steps come as integers, and what is made of them may be looked up in a table instead.
    """
    if func in DRAWING or func._schema.is_mutable:
        _no_longer_constant(func, leaves)
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return all(leaf.constant if isinstance(leaf, Shadow) else _is_plain(leaf) for leaf in tensors)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in HALVES or not (tensor.is_floating_point() or tensor.is_complex())


def _no_longer_constant(func, leaves: list) -> None:
    """What is written into may hold anything from now on."""
    for leaf in leaves if func._schema.is_mutable else ():
        if isinstance(leaf, Shadow):
            leaf.constant = False


def _natively(func, args: tuple, kwargs: dict):
    def own(leaf: object) -> object:
        return leaf.held.to(leaf.dtype) if isinstance(leaf, Shadow) else leaf

    def constant(value: object) -> object:
        if not isinstance(value, Tensor) or value.dtype not in HALVES:
            return value
        made = Shadow(value.to(torch.float64), value.dtype)
        made.constant = True
        return made

    args, kwargs = _mapped(own, (args, kwargs))
    return _mapped(constant, func(*args, **kwargs))


def _computed(func, args: tuple, kwargs: dict):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # what integers, and numbers written down, become
    try:
        return _EXACT.get(func, func)(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)


def _inner(leaf: object) -> object:
    """What an operation is given in place of an argument."""
    if isinstance(leaf, Shadow):
        return leaf.held
    if isinstance(leaf, Tensor) and leaf.dtype in WIDE:
        written = leaf.dtype is torch.float32 and not Shadow.native & (Native.TABLES | Native.NUMBERS)
        return table_as_written(leaf) if written else leaf.to(WIDE[leaf.dtype])
    if isinstance(leaf, torch.dtype):
        return WIDE.get(leaf, leaf)
    return leaf


def _written_back(func, given: tuple[tuple, dict], taken: tuple[tuple, dict]) -> None:
    """A plain tensor that an operation changes in place was replaced by a wider one: give it the values."""
    args, kwargs = given
    wide, wide_kwargs = taken
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        by_place = number < len(args)
        leaf = args[number] if by_place else kwargs.get(argument.name)
        value = wide[number] if by_place else wide_kwargs.get(argument.name)
        if isinstance(leaf, Tensor) and not isinstance(leaf, Shadow) and value is not leaf:
            leaf.copy_(value)


def _said(leaves: list) -> torch.dtype:
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
    if wide.is_complex():  # a conjugate that is one by its flag alone, which a shadow has not
        wide = wide.resolve_conj()
    wide = wide.resolve_neg()
    return Shadow(wide, _as_kind(said, wide.dtype))


def _as_kind(said: torch.dtype, held_as: torch.dtype) -> torch.dtype:
    """The real or the complex dtype of the same width as ``said``."""
    if held_as.is_complex and not said.is_complex:
        return torch.complex128 if said is torch.float64 else torch.complex64
    if said.is_complex and not held_as.is_complex:
        return torch.float64 if said is torch.complex128 else torch.float32
    return said


def _rounded(func: Callable, args: tuple, kwargs: dict):
    tensor = args[0]
    if not isinstance(tensor, Shadow):
        return func(*args, **kwargs)
    same = Shadow(_on_grid(func, args, kwargs), tensor.dtype)
    if func in _ROUND:
        same.whole = func(tensor.held, *args[1:], **kwargs)
        return same
    return same, torch.ones_like(tensor.held, dtype=torch.bool)


def _becomes_integers(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """What was rounded, where the operation makes integers of it."""
    if (
        func is not _aten._to_copy.default
        or not isinstance(args[0], Shadow)
        or kwargs.get("dtype") in (None, *WIDE)
    ):
        return None
    return args[0].whole


def _on_grid(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """A copy, rounded where that is kept. Fake quantisation never is."""
    tensor, *others = args
    Shadow.rounded += tensor.numel()
    kept = Native.GRIDS in Shadow.native and func in (*_ROUND, *_ROUND_IN_PLACE)
    return func(tensor.held.clone(), *others, **kwargs) if kept else tensor.held.clone()


def _reinterpreted(tensor: Shadow | Bits, dtype: torch.dtype) -> Tensor:
    """Bits that come back as a number near the one they were took a rounding; else they are a new number."""
    if isinstance(tensor, Bits):
        if not dtype.is_floating_point:
            return Bits(tensor.bits.view(dtype), tensor.source)
        value, source = tensor.bits.view(dtype).double(), tensor.source.held
        if value.shape != source.shape:
            return Shadow(value, dtype)
        near = (value - source).abs() <= _ROUNDED * source.abs()
        return Shadow(torch.where(near, source, value), dtype)
    if dtype.is_floating_point:
        return Shadow(tensor.held.clone(), dtype)
    return Bits(tensor.held.to(tensor.dtype).view(dtype), tensor)


def _on_bits(func, leaves: list, args: tuple, kwargs: dict):
    source = next(leaf.source for leaf in leaves if isinstance(leaf, Bits))
    args, kwargs = _mapped(lambda leaf: leaf.bits if isinstance(leaf, Bits) else leaf, (args, kwargs))
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and func._opname in _BITWISE and out.shape == source.shape:
        return Bits(out, source)
    return out
