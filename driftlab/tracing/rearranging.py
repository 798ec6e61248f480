"""The candidate's rows in the reference's order, where it has them in another throughout.

A port may join the picture's tokens in front of the words, or put the class token last. All that it makes of
them lies in its order, and no value of it can stand for the reference's as it lies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.kept import Kept
from driftlab.tracing.pairs import orders
from driftlab.tracing.prints import AGREE

# So many values must have one order, and none the reference's; of a length so many are looked at.
AGREEING, LOOKED_AT = 3, 40
LONGEST = 2048

Order = tuple[int, ...]


def rearranged(own: Kept, others: Kept) -> bool:
    """Whether the candidate's rows lay in another order; if so, they lie in the reference's from now on."""
    found = _orders(own, others)
    for values in (others.tensors, others.integers) if found else ():
        values.update((n, _in_order(values[n], found)) for n in values)
    return bool(found)


def _orders(own: Kept, others: Kept) -> dict[int, Order]:
    """Of each length of an axis that one, in which both lie otherwise, if it is the same in all they have."""
    seen: defaultdict[int, Counter[Order]] = defaultdict(Counter)
    fed = (n for n in own.tensors if (value := own.flow.values[n]).fed and not value.weight)
    pairs = ((n, m) for n in fed for m in own.looks_like(n)[:1] if m in others.tensors)
    for spot, number in pairs:
        mine, theirs = own.tensors[spot], others.tensors[number]
        turned = (theirs.permute(order) for order in orders(mine, theirs))
        for laid in (values for values in turned if values.shape == mine.shape):
            for length, order in _order_of(mine, laid, seen):
                seen[length][order] += 1
    one = {length: counted.most_common(1)[0] for length, counted in seen.items() if len(counted) == 1}
    return {n: order for n, (order, times) in one.items() if times >= AGREEING and order != tuple(range(n))}


def _order_of(
    mine: Tensor, theirs: Tensor, seen: Mapping[int, Counter[Order]]
) -> Iterator[tuple[int, Order]]:
    """Along the one axis along which it gives the one of the other; nothing where rows are alike."""
    for axis, length in enumerate(mine.shape):
        if length < 3 or length > LONGEST or seen[length].total() >= LOOKED_AT:
            continue
        own, other = (_marks(values, axis) for values in (mine, theirs))
        placed, given = own.argsort(), other.argsort()
        if bool((own[placed].diff() <= AGREE * own.abs().max()).any()):
            continue
        order = given[placed.argsort()]
        laid = theirs.index_select(axis, order)
        if distance(laid, mine) <= AGREE * float(torch.linalg.vector_norm(mine)):
            yield length, tuple(order.tolist())


def _marks(values: Tensor, axis: int) -> Tensor:
    """A number for each row, by which it is recognised."""
    rows = values.movedim(axis, 0).reshape(values.shape[axis], -1).double()
    generator = torch.Generator().manual_seed(0)
    return rows @ torch.randn(rows.shape[1], generator=generator, dtype=rows.dtype)


def _in_order(values: Tensor, orders: Mapping[int, Order]) -> Tensor:
    for axis, length in enumerate(values.shape):
        if length in orders:
            values = values.index_select(axis, torch.tensor(orders[length]))
    return values
