"""Indices, positions and masks of the one network, to be put in the place of the other's.

Their numbers say little: many tensors hold the same ones, and in another order they are another index. So
none is recognised by them. Where all are left out that both have number by number, few remain, and these are
tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.flow import in_steps
from driftlab.tracing.kept import Kept
from driftlab.tracing.pairs import orders
from driftlab.tracing.prints import of_zeros_and_ones

# Values that are compared at most, and pairs that are tried; operations that the candidate may leave out.
COMPARED, TRIED, STEPS = 300, 60, 2


@dataclass(frozen=True)
class IntegerPair:
    """A value of the candidate's for one of the reference's.

    Attributes:
        spot: the reference's, where another can be put in.
        made: that of which it is a copy.
        number: the candidate's.
        form: in which of its forms it is put in.
    """

    spot: int
    made: int
    number: int
    form: int

    def changes(self, own: Kept, others: Kept) -> Iterator[dict[int, Tensor]]:
        """What is put in: once, or whenever the two make it."""
        again = product(own.turns.again(self.spot), others.turns.again(self.number))
        both = {
            (tuple(mine), tuple(theirs))
            for mine, theirs in again
            if len(mine) == len(theirs) and own.counts(mine) and others.counts(theirs)
        }
        for mine, theirs in sorted(both, key=lambda pair: (len(pair[0]), pair)):
            forms = [_forms(own.integers[s], others.integers[n]) for s, n in zip(mine, theirs, strict=True)]
            if all(len(found) > self.form for found in forms):
                yield {s: found[self.form] for s, found in zip(mine, forms, strict=True)}


def integer_pairs(own: Kept, others: Kept) -> list[IntegerPair]:
    """Those that only one of the two has: the nearest of one size, and of others; the reference's first.

    Or of which the reference makes more by a few operations, and the candidate does not.
    """
    mine, theirs = _leading(own), _leading(others)
    apart = [
        (distance(own.integers[spot], values), IntegerPair(spot, mine[spot], number, form))
        for spot, number in product(mine, theirs)
        if own.flow.values[spot].made_by[0]  # else it is what was written into, and nothing puts it in
        for form, values in enumerate(_forms(own.integers[spot], others.integers[number]))
    ]
    alike, repeated = ([one for one in apart if _is_alike(one[1], own, others) is so] for so in (True, False))
    same = [p for far, p in alike if not far]
    had, had_there = {p.spot for p in same}, {p.number for p in same}
    # what a few operations make of it, where the other network may go on with it as it is
    soon = ((p, in_steps(p.spot, own.uses.__getitem__, STEPS)) for p in same)
    further = {(spot, p.number) for p, made in soon for spots in made for spot in spots}
    nearest: list[IntegerPair] = []
    for some in (alike, repeated):
        left = [
            (far, p)
            for far, p in some
            if far and p.spot not in had and (p.number not in had_there or (p.spot, p.number) in further)
        ]
        nearest += [pair for _, pair in sorted(left, key=lambda one: one[0])[:TRIED]]
    return sorted(nearest, key=lambda pair: (pair.spot, pair.number))


def _is_alike(pair: IntegerPair, own: Kept, others: Kept) -> bool:
    """Whether nothing has to be repeated."""
    return own.integers[pair.spot].numel() == others.integers[pair.number].numel()


def _leading(network: Kept) -> dict[int, int]:
    """Those that lead to the results and hold several numbers, copies once; with what each is a copy of."""
    values, integers = network.flow.values, network.integers
    made: dict[int, int] = {}
    found: dict[int, int] = {}
    for number in sorted(network.leading & integers.keys()):
        own = integers[number]
        copied = (i for i in values[number].inputs if i in made and torch.equal(integers[i], own))
        made[number] = made.get(next(copied, -1), number)
        first = made[number] not in found.values() and (values[number].made_by[0] or values[number].inputs)
        if first and not values[made[number]].given and own.max() > own.min():
            found[number] = made[number]
    return dict(list(found.items())[:COMPARED])


def _forms(like: Tensor, values: Tensor) -> list[Tensor]:
    """As it lies, turned or repeated to have the shape; of a mask, what is left out and what is kept."""
    if values.numel() == like.numel():
        laid = [values.reshape(like.shape), *_turned(like, values)]
    elif values.numel() < like.numel():
        laid = [*_repeated(values, like.shape)]
    else:
        laid = [once.reshape(like.shape) for once in _once(values, like.numel())]
    return [*laid, *(1 - one for one in laid)] if of_zeros_and_ones(values) else laid


def _turned(like: Tensor, values: Tensor) -> Iterator[Tensor]:
    if values.shape != like.shape:
        turned = (values.permute(order) for order in orders(like, values))
        yield from (one for one in turned if one.shape == like.shape)


def _repeated(values: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """With each of its numbers, or all of them, over and over along an axis, as one mask for all heads is."""
    times, rest = divmod(shape.numel(), max(1, values.numel()))
    for axis, size in enumerate(shape):
        fewer = torch.Size([*shape[:axis], size // times, *shape[axis + 1 :]])
        if not rest and not size % times and _without_ones(fewer) == _without_ones(values.shape):
            yield from _times(values.reshape(fewer), times, axis)


def _once(values: Tensor, numbers: int) -> Iterator[Tensor]:
    """What has so many numbers, of which these are repeated."""
    times, rest = divmod(values.numel(), max(1, numbers))
    for axis, size in enumerate(values.shape):
        if not rest and not size % times:
            each = values.unflatten(axis, (size // times, times)).select(axis + 1, 0)
            found = each, values.narrow(axis, 0, size // times)
            yield from (
                one for k, one in enumerate(found) if torch.equal(_times(one, times, axis)[k], values)
            )


def _times(values: Tensor, times: int, axis: int) -> tuple[Tensor, Tensor]:
    return values.repeat_interleave(times, axis), torch.cat([values] * times, axis)


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]
