"""Mistakes that keep the numbers of a result and give them in another order.

Channels read as (types, sizes) that were written as (sizes, types), rows for columns, copies that follow one
another where they should lie side by side. They are mutation operators as those of ``mutations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.torch_call import TRANSPOSED, Call
from driftlab.tracing.prints import of_zeros_and_ones

Mutation = tuple[str, Callable[[], Any]]
# They give the numbers that they are given.
COPIES = ("contiguous", "to", "float", "double", "clone", "type_as", "detach")
MOVES = (
    *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"),
    *("expand", "expand_as", "view_as", "t", "swapaxes", "broadcast_to", "repeat", "repeat_interleave"),
    *(*COPIES, *TRANSPOSED),
)
JOINS = ("cat", "stack", "concat")
_REGROUPS = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
_EXCHANGES = ("transpose", "permute", "movedim", "swapaxes", "t", *TRANSPOSED)


def turnings(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Dimensions of one size exchanged, or the numbers along one in another order."""
    for one, other in combinations(range(tensor.dim()), 2):
        if tensor.shape[one] == tensor.shape[other] > 1:
            yield f"with dimensions {one} and {other} exchanged", tensor.transpose(one, other)
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield f"in reverse along dimension {dim}", tensor.flip(dim)
        if size > 2 and size % 2 == 0:
            yield f"with its halves along dimension {dim} exchanged", tensor.roll(size // 2, dim)
            pairs = tensor.unflatten(dim, (-1, 2)).flip(dim + 1).flatten(dim, dim + 1)
            yield f"with neighbours along dimension {dim} exchanged", pairs
        for by in (1, -1) if size in (3, 4) else ():  # a quaternion with its real part last
            yield f"rolled by {by} along dimension {dim}", tensor.roll(by, dim)


def _turned(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """The result."""
    out = call.run()
    for words, turned in turnings(out) if isinstance(out, Tensor) else ():
        yield f"the result of `{call.name}` {words}", lambda turned=turned: turned


def _regrouped(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Neighbouring dimensions merged, or one split, in the other order."""
    if call.name not in _REGROUPS:
        return
    x, out = call.tensors[0], call.run()
    for dim in _borders(x.shape, out.shape):
        merged = x.transpose(dim, dim + 1)
        words = f"dimensions {dim} and {dim + 1} exchanged before `{call.name}`"
        yield words, lambda merged=merged: merged.reshape(out.shape)
    for first, last in _runs(_borders(x.shape, out.shape)):
        for one, other in ((first, last), (last, first)):  # channels last, not first, or the other way round
            words = f"dimension {one} moved to {other} before `{call.name}`"
            yield words, lambda one=one, other=other: x.movedim(one, other).reshape(out.shape)
    for dim in _borders(out.shape, x.shape):
        sizes = list(out.shape)
        sizes[dim : dim + 2] = sizes[dim + 1], sizes[dim]
        words = f"dimensions {dim} and {dim + 1} of `{call.name}` in the other order"
        yield words, lambda sizes=sizes, dim=dim: x.reshape(sizes).transpose(dim, dim + 1)


def _runs(borders: list[int]) -> list[tuple[int, int]]:
    """The first and the last of three or more dimensions that become one."""
    firsts = [dim for dim in borders if dim - 1 not in borders]
    lasts = [dim + 1 for dim in borders if dim + 1 not in borders]
    return [(first, last) for first, last in zip(firsts, lasts, strict=True) if last > first + 1]


def _borders(own: torch.Size, other: torch.Size) -> list[int]:
    """Of each border between two dimensions longer than 1 that ``other`` has not, the dimension before it."""
    kept = {prod(other[dim:]) for dim in range(len(other) + 1)}
    pairs = enumerate(pairwise(own))
    return [dim for dim, (a, b) in pairs if a > 1 and b > 1 and prod(own[dim + 1 :]) not in kept]


def _not_moved(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Dimensions of one size that stay where they are, and parts that are joined in the other order."""
    if call.name in _EXCHANGES:
        yield f"`{call.name}` left out", lambda: call.tensors[0]
    if call.name in JOINS and call.args and isinstance(call.args[0], list | tuple):
        in_reverse = Call(call.function, (call.args[0][::-1], *call.args[1:]), call.kwargs)
        yield f"`{call.name}` in reverse", in_reverse.run


def _copied(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Copies one after another for copies side by side, and the other way round."""
    if call.name not in ("repeat", "repeat_interleave"):
        return
    x, out = call.tensors[0], call.run()
    if x.dim() != out.dim():
        return
    times = [m // n for n, m in zip(x.shape, out.shape, strict=True)]
    longer = [dim for dim, n in enumerate(times) if n > 1 and x.shape[dim] > 1]
    if len(longer) != 1:
        return
    dim = longer[0]
    if call.name == "repeat":
        yield "`repeat_interleave` for `repeat`", lambda: x.repeat_interleave(times[dim], dim)
    else:
        yield "`repeat` for `repeat_interleave`", lambda: x.repeat(times)


def _shuffled(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Channels that become pixels: those of a pixel together, not those of a channel; columns before rows."""
    if call.name != "pixel_shuffle":
        return
    x, by = call.tensors[0], call.argument(1, "upscale_factor")
    last = x.unflatten(-3, (by, by, -1)).movedim(-3, -5)
    yield "the channels of `pixel_shuffle` last", lambda: call.with_tensor(0, last.flatten(-5, -3)).run()
    turned = x.unflatten(-3, (-1, by, by)).transpose(-4, -3)
    words = "rows and columns of `pixel_shuffle` exchanged"
    yield words, lambda: call.with_tensor(0, turned.flatten(-5, -3)).run()
    both = last.transpose(-4, -3).flatten(-5, -3)
    yield "the channels of `pixel_shuffle` last, columns first", lambda: call.with_tensor(0, both).run()


def moved_on(mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A mask along its last dimension, with its edge once more."""
    if mask.dim() and mask.shape[-1] > 2 and of_zeros_and_ones(mask):
        yield "moved on by one", torch.cat([mask[..., :1], mask[..., :-1]], -1)
        yield "moved back by one", torch.cat([mask[..., 1:], mask[..., -1:]], -1)


def _moved_on(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A result that is a mask."""
    out = call.run()
    for words, moved in moved_on(out) if isinstance(out, Tensor) else ():
        yield f"the result of `{call.name}` {words}", lambda moved=moved: moved


ORDERS = (_regrouped, _not_moved, _copied, _shuffled, _turned)
MASKS = (_moved_on,)
