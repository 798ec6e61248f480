"""Mistakes in which part of a value is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call


def parts_exchanged(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Gate and up, or query and key, in the other order."""
    if call.name in ("chunk", "split", "tensor_split", "unbind", "split_with_sizes"):
        parts = list(call.run())
        for i, j in combinations(range(len(parts)), 2) if len(parts) <= 4 else ():
            order = list(range(len(parts)))
            order[i], order[j] = j, i
            words = f"parts {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, lambda order=tuple(order): tuple(call.run()[k] for k in order)


def cut_elsewhere(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A slice that leaves out at the other end what it leaves out."""
    if call.name != "getitem" or len(call.args) != 2:
        return
    x, index = call.args
    parts = index if isinstance(index, tuple) else (index,)
    for place, axis in _sliced(parts, x.dim()):
        start, stop, step = parts[place].indices(x.shape[axis])
        other = slice(x.shape[axis] - stop, x.shape[axis] - start)
        if step == 1 and start < stop and (other.start, other.stop) != (start, stop):
            changed = (*parts[:place], other, *parts[place + 1 :])
            yield "a slice from the other end", lambda changed=changed: x[changed]


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
