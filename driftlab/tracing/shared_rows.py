"""Which rows of their values two networks have in common, where one of them leaves some out.

A sequence is filled up to a multiple of a window, or graphs and sentences of several lengths to the longest,
where another program computes what is there and nothing else. No value of the one has the size of the
other's then, and they seem to part from the first on. So the rows are sought that the two have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from driftlab.arithmetic.shadow import plain
from driftlab.tracing.flow import Flow, Value
from driftlab.tracing.prints import AGREE, Seen, prints, sums
from driftlab.tracing.rows import Rows

# Of so many values of a size, the first that the other network has not; of so many rows, of which the other
# has one in so many at least.
FIRST, MOST, SHARE = 4, 2048, 4

Record = Callable[..., Flow]
BothRows = tuple[Rows | None, Rows | None]


def rows_of(mine: Record, theirs: Record, own: Flow, other: Flow) -> BothRows:
    """Of reference and candidate; both None where they compute as many rows, or where that is not seen.

    By the first values that the other has not: of the first two of which the one is rows of the other, and
    not too few of them.

    Args:
        mine, theirs: record the two; arguments as of ``Recorder``.
        own, other: their flows.
    """
    lacked = _lacked(own, other.seen()), _lacked(other, own.seen())
    if not any(min(a, b) < max(a, b) <= SHARE * min(a, b) for a in lacked[0] for b in lacked[1]):
        return None, None
    return kept_rows(_tensors(mine, lacked[0]), _tensors(theirs, lacked[1]))


def _lacked(flow: Flow, other: Seen) -> dict[int, list[int]]:
    """The first values of each size that the other network has not."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(flow.values):
        if (seen := value.prints) is not None and value.fed and not value.given and seen.telling:
            own = found[seen.whole[0]]
            if len(own) < FIRST and not other.has(seen):
                own.append(number)
    return {size: numbers for size, numbers in found.items() if numbers}


def _tensors(record: Record, lacked: Mapping[int, Sequence[int]]) -> list[Tensor]:
    """Those of its values that have rows."""
    numbers, found = set(chain(*lacked.values())), list[Tensor]()

    def keep(number: int, value: Value, tensor: Tensor) -> None:
        if number in numbers and tensor.dim() > 1 and tensor.is_floating_point() and _is_dense(tensor):
            found.append(plain(tensor).double().cpu().clone())

    record(change=keep, printed=())
    return found


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def kept_rows(own: Iterable[Tensor], others: Sequence[Tensor]) -> BothRows:
    """By some values of each, [..., numbers of a row]."""
    for mine in own:
        for theirs in others:
            if mine.shape[-1] == theirs.shape[-1] and mine.numel() != theirs.numel():
                fewer, more = sorted((mine, theirs), key=Tensor.numel)
                if SHARE * fewer.numel() >= more.numel() and (kept := _rows_in(fewer, more)) is not None:
                    rows = Rows(tuple(more.shape[:-1]), kept)
                    return (rows, None) if more is mine else (None, rows)
    return None, None


def _rows_in(fewer: Tensor, more: Tensor) -> Tensor | None:
    """Which rows of ``more`` the other's are, each another one: the next that is alike, if there is one."""
    found = prints(fewer)
    if more.numel() > MOST * more.shape[-1] or found is None or not found.telling:
        return None
    few, many = (sums(values.flatten(0, -2)) for values in (fewer, more))
    within = AGREE * few[:, [0, 1, 0, 1]]
    alike = ((few[:, None] - many).abs() <= within[:, None]).all(-1)
    if not bool(alike.any(1).all()):
        return None
    kept: list[int] = []
    free, last = torch.ones(len(many), dtype=torch.bool), -1
    for row in alike:
        places = (row & free).nonzero()[:, 0].tolist()
        if not places:
            return None
        last = next((place for place in places if place > last), places[0])
        free[last] = False
        kept.append(last)
    return torch.tensor(kept)
