"""What stands in for CUDA's kernels: the CPU's, which refuse and wait where a GPU does.

An operation that has a kernel on CUDA and none on the CPU raises, unless ``composed.py`` writes it out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from tests.pretended_cuda.composed import ABOVE_AUTOGRAD, COMPOSED, INSTEAD
from tests.pretended_cuda.memory import gpu_of, lent, on_device, on_host, within

Op = torch._ops.OpOverload


class Driver(Protocol):
    """What the kernels ask of the device."""

    def lends(self, asked: torch.device) -> torch.device:
        """Where ``cuda`` or ``cuda:N`` is in C++."""

    def waits(self, what: str) -> None:
        """The host waits here."""

    def drawing(self, index: int) -> object:
        """A context in which random numbers come from the state of a GPU."""


# The host waits for what these found: a number, or how large their result is.
WAITED_FOR = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2"),
    *("unique_dim", "unique_consecutive", "bincount"),
}
INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
INDICES = {torch.int32, torch.int64, torch.uint8, torch.bool}
# These take a number that lies on the host, as all do that are tagged "pointwise".
TAKE_NUMBERS = {"fill", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_", *INDEXED}
# In C++ made up of others, by a choice among kernels in which this device is none.
CHOSEN_IN_CPP = ("copy_", "convolution", "convolution_backward")


@contextmanager
def in_place(driver: Driver) -> Iterator[None]:
    """Within it CUDA's operations have these kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that CUDA's own are overridden
            _register(library, driver)
        yield
    finally:
        library._destroy()


def _register(library: torch.library.Library, driver: Driver) -> None:
    cuda, cpu = (_registered(key) for key in ("CUDA", "CPU"))
    composite = _registered("CompositeExplicitAutograd") | _registered("CompositeImplicitAutograd")
    for name in cuda | {f"aten::{n}" for n in CHOSEN_IN_CPP}:
        op = _op(name)
        if op in COMPOSED:
            library.impl(op, COMPOSED[op], "CUDA")
        elif not _only_places(op):
            computes = INSTEAD.get(op) or (op if name in cpu | composite else _no_kernel(op))
            library.impl(op, _kernel(op, computes, driver), "CUDA")
    for op in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        library.impl(op, _kernel(op, op, driver), "Lazy")
    for op, composed in ABOVE_AUTOGRAD.items():
        library.impl(op, composed, "AutogradCUDA")
        library.impl(op, composed, "AutogradLazy")


def _registered(key: str) -> set[str]:
    return {n for n in torch._C._dispatch_get_registrations_for_dispatch_key(key) if n.startswith("aten::")}


def _op(name: str) -> Op:
    name, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def _only_places(op: Op) -> bool:
    """It says where a tensor lies in its storage, and CUDA's own does so without a GPU."""
    results = op._schema.returns
    view = bool(results) and results[0].alias_info is not None and not results[0].alias_info.is_write
    return view or op._opname == "set_"


def _no_kernel(op: Op) -> Callable:
    def raising(*args, **kwargs):
        raise NotImplementedError(f"the pretended CUDA device has no kernel for {op}")

    return raising


def _kernel(op: Op, computes: Callable, driver: Driver) -> Callable:
    """``computes``, on tensors of a GPU. Arguments are looked through by hand: it is called very often."""
    random, waited_for = torch.Tag.nondeterministic_seeded in op.tags, _waited_for(op)
    numbers = not torch._C._should_allow_numbers_as_tensors(op._opname)

    def kernel(*args, **kwargs):
        if numbers:
            args = _as_tensors(op, args)
        leaves = _leaves(args, kwargs.values())
        gpu = _gpu(op, leaves, driver)
        if waited_for is not None:
            for what in waited_for(args, kwargs):
                driver.waits(what)
        there: dict[int, tuple[Tensor, Tensor]] = {}  # what the CPU sees, and what it is
        args = [_on_host(a, there) for a in args]
        kwargs = {name: _on_host(a, there) for name, a in kwargs.items()}
        with driver.drawing(gpu) if random else nullcontext():
            out = computes(*args, **kwargs)
        for host, tensor in there.values():
            if host.shape != tensor.shape:
                _give_room(tensor, host)
        return _back(out, there, gpu)

    return kernel


def _leaves(args: Iterable, more: Iterable) -> list:
    """The arguments, those in lists too."""
    found = []
    for argument in (*args, *more):
        if isinstance(argument, list | tuple):
            found.extend(argument)
        else:
            found.append(argument)
    return found


def _as_tensors(op: Op, args: tuple) -> tuple:
    """Numbers where the operation wants tensors, which C++ told from numbers by a flag."""
    if not any(isinstance(a, int | float | complex) for a in args):
        return args
    wanted = [isinstance(a.type, torch.TensorType) for a in op._schema.arguments]
    return tuple(
        torch.tensor(a) if tensor and isinstance(a, int | float | complex) else a
        for a, tensor in zip(args, wanted, strict=False)
    )


def _on_host(argument: object, there: dict[int, tuple[Tensor, Tensor]]) -> object:
    if isinstance(argument, list | tuple):
        return [_on_host(a, there) for a in argument]
    if isinstance(argument, Tensor):
        host = argument
        if gpu_of(argument) >= 0:
            # what is empty may be made to grow, as an ``out=`` is
            full = argument.untyped_storage().nbytes()
            host = on_host(argument) if full else torch.empty_like(argument, device="cpu")
        there[id(host)] = host, argument
        return host
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _give_room(tensor: Tensor, host: Tensor) -> None:
    """To what was empty and has grown."""
    grown = on_device(lent(gpu_of(tensor)), host)
    tensor.set_(grown.untyped_storage(), 0, grown.size(), grown.stride())


def _back(out: object, there: dict[int, tuple[Tensor, Tensor]], gpu: int) -> object:
    """A result: an argument, a tensor in the storage of one, or one of its own."""
    if isinstance(out, list | tuple):
        return type(out)(_back(o, there, gpu) for o in out)
    if not isinstance(out, Tensor):
        return out
    if id(out) in there:
        return there[id(out)][1]
    start = out.untyped_storage().data_ptr()
    for host, tensor in there.values():
        if start and gpu_of(tensor) >= 0 and host.untyped_storage().data_ptr() == start:
            return within(tensor.untyped_storage(), out)
    return on_device(lent(gpu), out)


def _gpu(op: Op, leaves: list, driver: Driver) -> int:
    """Where ``op`` takes place. Raises RuntimeError where its arguments lie on two devices, as a GPU does."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    places = [gpu_of(t) for t in tensors]
    there = set(places) - {-1}
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if there and (len(there) > 1 or -1 in places) and op._opname != "copy_":
        here = [t for t, place in zip(tensors, places, strict=True) if place < 0]
        apart = [t for t in here if not _may_stay_here(op, t, tensors)]
        if len(there) > 1 or apart:
            both = [f"cuda:{n}" for n in sorted(there)] + ["cpu"] * bool(apart)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(both)}! (when checking arguments of {op})"
            )
    if there:
        return max(there)
    asked = next(leaf for leaf in leaves if isinstance(leaf, torch.device))
    return (driver.lends(asked) if asked.type == "cuda" else asked).index


def _may_stay_here(op: Op, tensor: Tensor, tensors: list[Tensor]) -> bool:
    """A number that is not written to, or indices: a GPU takes these from the host."""
    if op._opname in INDEXED and tensor.dtype in INDICES and tensor is not tensors[0]:
        return True
    written = op._schema.is_mutable and tensor is tensors[0]
    takes_numbers = torch.Tag.pointwise in op.tags or op._opname in TAKE_NUMBERS or "_foreach" in op._opname
    return tensor.dim() == 0 and takes_numbers and not written


def _waited_for(op: Op) -> Callable[[tuple, dict], Iterator[str]] | None:
    """What says, of the arguments, what the host waits for; None where it never does."""
    name = op._opname

    def always(args: tuple, kwargs: dict) -> Iterator[str]:
        yield name

    def unless_sized(args: tuple, kwargs: dict) -> Iterator[str]:
        if kwargs.get("output_size") is None:
            yield name

    def indexed(args: tuple, kwargs: dict) -> Iterator[str]:
        indices = [t for t in _leaves(args[1:], ()) if isinstance(t, Tensor) and t.dtype in INDICES]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            yield f"{name} by a mask"
        if any(i.dim() and gpu_of(i) < 0 for i in indices):
            yield f"{name} by indices of the host"

    def copied(args: tuple, kwargs: dict) -> Iterator[str]:
        from_host = gpu_of(args[1]) < 0
        if from_host == (gpu_of(args[0]) < 0):
            return
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if blocking or not args[1 if from_host else 0].is_pinned():
            yield f"copy {'from' if from_host else 'to'} the host"

    by_name = {"copy_": copied, "repeat_interleave": unless_sized, **dict.fromkeys(INDEXED, indexed)}
    return by_name.get(name, always if name in WAITED_FOR else None)
