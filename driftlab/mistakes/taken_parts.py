"""Mistakes in which part of a value is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

_PARTS = ("chunk", "split", "tensor_split", "split_with_sizes")
_MOVED = (("one earlier", -1), ("one later", 1), ("two earlier", -2), ("two later", 2))


def parts_exchanged(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Gate and up, or query and key, in the other order."""
    if call.name in (*_PARTS, "unbind"):
        parts = list(call.run())
        for i, j in combinations(range(len(parts)), 2) if len(parts) <= 4 else ():
            order = list(range(len(parts)))
            order[i], order[j] = j, i
            words = f"parts {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, lambda order=tuple(order): tuple(call.run()[k] for k in order)


def cut_elsewhere(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A slice that leaves out at the other end what it leaves out, or begins one or two earlier or later."""
    if call.name == "getitem" and len(call.args) == 2:
        yield from _other_slices(*call.args)
    elif call.name in _PARTS:
        yield from _other_parts(call)


def _other_slices(x: Tensor, index: object) -> Iterator[Mutation]:
    parts = index if isinstance(index, tuple) else (index,)
    for place, axis in _sliced(parts, x.dim()):
        size = x.shape[axis]
        start, stop, step = parts[place].indices(size)
        if step != 1 or start >= stop:
            continue
        others = {"a slice from the other end": (size - stop, size - start)}
        others |= {f"a slice {words}": (start + by, stop + by) for words, by in _MOVED}
        for words, (begin, end) in others.items():
            if begin >= 0 and end <= size and begin != start:
                changed = (*parts[:place], slice(begin, end), *parts[place + 1 :])
                yield words, lambda changed=changed: x[changed]


def _other_parts(call: Call) -> Iterator[Mutation]:
    x, parts = call.tensors[0], list(call.run())
    axis = next((a for a in range(x.dim()) if any(p.shape[a] != x.shape[a] for p in parts)), 0)
    starts = [sum(p.shape[axis] for p in parts[:at]) for at in range(len(parts))]
    for at, (start, part) in enumerate(zip(starts, parts, strict=True)):
        for words, by in _MOVED:
            if start + by >= 0 and start + by + part.shape[axis] <= x.shape[axis]:
                moved = x.narrow(axis, start + by, part.shape[axis])
                made = (*parts[:at], moved, *parts[at + 1 :])
                yield f"part {at + 1} of `{call.name}` {words}", lambda made=made: made


def _sliced(parts: tuple, axes: int) -> Iterator[tuple[int, int]]:
    """Where in an index slices stand, and the axis of each."""
    end = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    early = [i for i in range(end) if parts[i] is not None]
    late = [i for i in range(end + 1, len(parts)) if parts[i] is not None]
    for i, axis in (
        *zip(early, range(axes), strict=False),
        *zip(late[::-1], range(axes - 1, -1, -1), strict=False),
    ):
        if isinstance(parts[i], slice):
            yield i, axis
