"""Finding a tensor's slices again among those of other tensors, by hashes of their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# One more dimension, of size 1: along it the whole tensor is a single slice.
WHOLE = -1


class Slices(NamedTuple):
    """One way to cut a tensor: its dimensions permuted, then cut along the first.

    Attributes:
        source: the tensor's name.
        order: its dimensions as permuted, and WHOLE.
        hashes: one a slice, int64.
        length: elements in a slice.
    """

    source: str
    order: tuple[int, ...]
    hashes: Tensor
    length: int


def whole_hash(tensor: Tensor) -> int:
    """A hash of the values in flat order, whatever the shape."""
    return int(_hash(_mixed(tensor).reshape(1, -1)))


def shuffled_hash(tensor: Tensor) -> int:
    """A hash of the values in whatever order."""
    return int(_scrambled(_mixed(tensor).reshape(-1)).sum())


def order_alike(mine: Tensor, theirs: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which ``theirs``, read flat, is ``mine``, read flat; None if there is none.

    The two have the same number of elements. A few places are compared before all of them.
    """
    places = torch.randint(mine.numel(), (64,), generator=torch.Generator().manual_seed(0))
    flat = mine.reshape(-1)
    for order in permutations(range(theirs.dim())):
        permuted = theirs.permute(order)
        alike = torch.equal(permuted[np.unravel_index(places.numpy(), permuted.shape)], flat[places])
        if alike and torch.equal(permuted.reshape(-1), flat):
            return order
    return None


def cut(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The slices as rows [n, length]; see ``Slices.order``."""
    permuted = tensor.unsqueeze(0).permute([dim + 1 for dim in order])
    return permuted.reshape(permuted.shape[0], -1)


def uncut(rows: Tensor, order: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` whose slices are ``rows``: the inverse of ``cut``."""
    permuted = rows.view([1 if dim == WHOLE else shape[dim] for dim in order])
    return permuted.permute(sorted(range(len(order)), key=order.__getitem__)).squeeze(0)


def ways_to_cut(
    name: str,
    tensor: Tensor,
    dims: Iterable[int] | None = None,
    lengths: set[int] | None = None,
    every_order: bool = False,
) -> Iterator[Slices]:
    """All cuts along one dimension, or WHOLE.

    Dimensions of size 1 make no difference: they are put last, and none is cut.

    Args:
        dims: those to cut along; None for all.
        lengths: of the slices; None for any.
        every_order: the other dimensions in any order, instead of as they are.
    """
    mixed, count = _mixed(tensor), tensor.numel()
    real = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    ones = [dim for dim, size in enumerate(tensor.shape) if size == 1]
    for along in [WHOLE, *real]:
        length = count if along == WHOLE else count // tensor.shape[along]
        if (dims is not None and along not in dims) or (lengths is not None and length not in lengths):
            continue
        rest = [dim for dim in real if dim != along]
        for others in permutations(rest) if every_order else [rest]:
            order = (along, *others, *ones) if along == WHOLE else (along, *others, *ones, WHOLE)
            yield Slices(name, order, _hash(cut(mixed, order)), length)


def match(target: Slices, pool: list[Slices], free: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """For every slice of ``target`` a free slice of the pool with the same hash, each used once.

    Runs of slices that keep their order come first, slice by slice second; among equals the pool's order
    decides.

    Args:
        free: for each of the pool, which of its slices may be used, bool.

    Returns:
        Index into the pool and index of the slice there, each int64 [n]; None where a slice has no match.
    """
    which, row = torch.full_like(target.hashes, -1), torch.full_like(target.hashes, -1)
    for number, slices in enumerate(pool):
        _match_run(target.hashes, slices.hashes, free[number], number, which, row)
        if bool((which >= 0).all()):
            return which, row
    if pool:
        _match_singly(target, pool, free, which, row)
    return (which, row) if bool((which >= 0).all()) else None


def _match_run(
    target: Tensor, hashes: Tensor, free: Tensor, number: int, which: Tensor, row: Tensor, tries: int = 8
) -> None:
    """Mark where the shorter of the two lies, whole and in order, within the longer."""
    size = min(len(target), len(hashes))
    inside_target = len(hashes) < len(target)
    longer, shorter = (target, hashes) if inside_target else (hashes, target)
    starts = (longer[: len(longer) - size + 1] == shorter[0]).nonzero().flatten()[:tries].tolist()
    for start in starts:
        mine = slice(start, start + size) if inside_target else slice(0, size)
        theirs = slice(0, size) if inside_target else slice(start, start + size)
        unused = bool((which[mine] < 0).all()) and bool(free[theirs].all())
        if unused and torch.equal(target[mine], hashes[theirs]):
            which[mine], row[mine] = number, torch.arange(theirs.start, theirs.stop)
            return


def _match_singly(target: Slices, pool: list[Slices], free: list[Tensor], which: Tensor, row: Tensor) -> None:
    """Match what is left one by one; equal slices in order, unless they are single numbers."""
    unused = [mask.clone() for mask in free]
    for number in range(len(pool)):
        unused[number][row[which == number]] = False
    left = (which < 0).nonzero().flatten()
    hashes = torch.cat([s.hashes[mask] for s, mask in zip(pool, unused, strict=True)])
    numbers = torch.cat([torch.full((int(m.sum()),), i) for i, m in enumerate(unused)])
    rows = torch.cat([mask.nonzero().flatten() for mask in unused])
    wanted, order = target.hashes[left].sort(stable=True)
    known, known_order = hashes.sort(stable=True)
    first = torch.searchsorted(known, wanted)
    # The k-th of several equal slices takes the k-th match.
    place = first + torch.arange(len(wanted)) - torch.searchsorted(wanted, wanted)
    if not len(known) or bool((place >= len(known)).any()) or bool((known[place] != wanted).any()):
        return
    repeated = torch.searchsorted(known, wanted, right=True) - first > 1
    if target.length == 1 and bool(repeated.any()):
        return
    chosen = known_order[place]
    which[left[order]], row[left[order]] = numbers[chosen], rows[chosen]


def _mixed(tensor: Tensor) -> Tensor:
    """Values as int64 in the tensor's shape, equal where the values are equal (0.0 and -0.0 too)."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    bits = (tensor.double() + 0.0).view(torch.int64)
    # Numbers that came from float32 have no bits at the low end, where multiplication keeps most of them.
    bits ^= bits >> 32
    return bits


def _hash(rows: Tensor) -> Tensor:
    """One int64 a row [n, length], which depends on the order within it."""
    factors = _scrambled(torch.arange(1, rows.shape[1] + 1))
    return (rows * (factors | 1)).sum(dim=1)


def _scrambled(numbers: Tensor) -> Tensor:
    """Other numbers, one to one, without any pattern (much as splitmix64 does it)."""
    numbers = numbers * 0x1E3779B97F4A7C15
    numbers ^= numbers >> 31
    numbers *= 0x3F58476D1CE4E5B9
    numbers ^= numbers >> 29
    return numbers
