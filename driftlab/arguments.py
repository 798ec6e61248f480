"""What the public calls are given, checked before anything is trained: batches, steps, optimizers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from driftlab.blame import theirs
from driftlab.network.calling import cast, copied, own_batch, tensors_in
from driftlab.refusing import check_values, flattening, shown, told, whole_number
from driftlab.words import DiagnoseError

# Of random layers 2^32 and more are left for the steps, see ``step_seed``.
LARGEST_SEED = 2**32 - 1
# Rows, and the modules around the weights, of the two smallest networks: 10 updates more take it 10 times.
BYTES_A_STEP = 50_000


def check_tensors(name: str, values: object) -> None:
    """Raises DiagnoseError where nothing can be computed of the tensors, or on them."""
    if isinstance(values, Iterator):
        raise DiagnoseError(f"{name} is a {type(values).__name__}, which can be read once: give a tuple")
    with flattening(name, "a tensor, or a tuple or dict of arguments"):
        tensors = tensors_in(values)
    check_values(name, tensors)
    if tensors and not any(t.numel() for t in tensors):
        shapes = " and ".join(str(list(t.shape)) for t in tensors[:3])
        raise DiagnoseError(
            f"{name} holds no number ({shapes}), on which nothing could differ: give a row or more"
        )


def the_seed(seed: object) -> int:
    return whole_number("seed", seed, 0, LARGEST_SEED)


def the_steps(steps: object, *networks: nn.Module) -> int:
    """As a number, where memory holds what is kept of so many. Raises DiagnoseError."""
    number = whole_number("steps", steps, 1)
    size = sum(t.nbytes for n in networks for t in (*n.parameters(), *n.buffers()))
    room, kept = _memory(), number * (size + BYTES_A_STEP)
    if kept > room:
        raise DiagnoseError(
            f"steps={number}: what is kept of so many would take {kept / 1e9:.0f} GB of memory; there are "
            f"{room / 1e9:.0f}: give at most steps={int(room // (size + BYTES_A_STEP))}"
        )
    return number


def _memory() -> float:
    """Bytes that this process may have at all: the machine's, or its container's."""
    try:
        room = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not on this system
        return float("inf")
    try:
        return min(room, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return room


def the_batches(batches: Iterable[tuple[object, object]], most: int) -> Sequence[tuple[object, object]]:
    """The first ``most`` of them in float32, or all where there are fewer. Raises DiagnoseError."""
    kept, size, room = [], 0, _memory()
    for batch in islice(_drawn(batches), most):
        _check_pair(batch)
        check_tensors(f"batches[{len(kept)}]", batch[0])
        with flattening(f"the targets of batches[{len(kept)}]", "tensors, or a tuple or dict of them"):
            targets = own_batch(batch[1], torch.float32)
        kept.append((_trainable(batch[0]), targets))
        size += sum(t.nbytes for t in tensors_in(batch))
        if size > room and not isinstance(batches, Sequence):  # a list is in memory already
            raise DiagnoseError(
                f"batches: memory does not hold the first {len(kept)}: give fewer, or a smaller steps"
            )
    if not kept:
        raise DiagnoseError("batches holds none: give an iterable of (inputs, targets)")
    return kept


def _trainable(values: object) -> object:
    """In float32; no backward pass keeps what was made in ``inference_mode``, so of that a copy."""
    of = cast(values, torch.float32)
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, of)


def _drawn(batches: Any) -> Iterator[Any]:
    if not hasattr(type(batches), "__iter__") and not hasattr(type(batches), "__getitem__"):
        raise DiagnoseError(f"batches is a {type(batches).__name__}: give an iterable of (inputs, targets)")
    with told("batches raised"):
        stream = theirs(iter, batches)
    while True:
        with told("batches raised"):
            try:
                batch = theirs(next, stream)
            except StopIteration:
                return
        yield batch


def _check_pair(batch: object) -> None:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of {theirs(len, batch)}" if hasattr(batch, "__len__") else "")
        raise DiagnoseError(f"batches holds a {kind}: give pairs (inputs, targets)")


def stepping(
    name: str, make: Callable[[Any], Optimizer], given: Callable[[nn.Module], Any] = lambda module: module
) -> Callable[[nn.Module], Optimizer]:
    """``make(given(module))`` of any module, checked: it must move that module.

    Its groups may hold copies of the module's parameters (master weights), if its step carries them back.

    Raises:
        DiagnoseError: ``make`` cannot be called; and, when called, it raises, or makes something else.
    """
    if not callable(make):
        raise DiagnoseError(
            f"{name} is a {type(make).__name__}: give a function that makes an optimizer, as in "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )

    def made(module: nn.Module) -> Optimizer:
        with told(f"{name} raised"):
            optimizer = theirs(make, given(module))
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            raise DiagnoseError(f"{name} returned a {type(optimizer).__name__}: it must return an optimizer")
        own = {id(p) for p in module.parameters()}
        moved = {id(p) for group in groups for p in group["params"]}
        # masters alone, which its step carries back; beside some of the module's own they are strangers
        masters = not moved & own and _moves(lambda twin: theirs(make, given(twin)), module)
        if moved - own and not masters:
            raise DiagnoseError(
                f"{name} moves parameters of another network: make the optimizer of those that it is given"
            )
        return optimizer

    return made


def _moves(make: Callable[[nn.Module], Optimizer], module: nn.Module) -> bool:
    """Whether a step moves a copy of ``module``; what else it moves is put back."""
    twin = copied(module)
    optimizer = make(twin)
    before = [(p, p.detach().clone(), p.grad) for g in optimizer.param_groups for p in g["params"]]
    start = [p.detach().clone() for p in twin.parameters()]
    for parameter in twin.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        theirs(optimizer.step)
        return any(not torch.equal(p, s) for p, s in zip(twin.parameters(), start, strict=True))
    finally:
        for parameter, value, gradient in before:
            parameter.data.copy_(value)
            parameter.grad = gradient


def moved_by(scheduler: Any) -> Callable[[Optimizer], LRScheduler | None] | None:
    """``scheduler(optimizer)``, checked when it is made. Raises DiagnoseError where it cannot be called."""
    if scheduler is None:
        return None
    if not callable(scheduler):
        kind = type(scheduler).__name__
        raise DiagnoseError(f"scheduler is a {kind}: give a function that makes one of an optimizer")

    def made(optimizer: Optimizer) -> LRScheduler | None:
        with told("scheduler raised"):
            found = theirs(scheduler, optimizer)
        if found is not None and not callable(getattr(found, "step", None)):
            kind = type(found).__name__
            raise DiagnoseError(f"scheduler returned a {kind}: it must return a learning-rate scheduler")
        return found

    return made


def is_above_0(number: Any) -> bool:
    """Whether it is a number above 0, and finite."""
    counts = isinstance(number, int | float) and not isinstance(number, bool)
    return counts and 0 < number <= sys.float_info.max


def clipped_by(clip: Any) -> Callable[[nn.Module], object] | None:
    """``clip`` of a module's parameters. Raises DiagnoseError where it is neither a norm nor a function."""
    if clip is None or callable(clip):
        return clip and (lambda module: theirs(clip, module.parameters()))
    if not is_above_0(clip):
        raise DiagnoseError(f"clip is {shown(clip)}: give a norm above 0, or a function of the parameters")
    return lambda module: nn.utils.clip_grad_norm_(module.parameters(), clip)
