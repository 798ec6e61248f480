"""Finding tensors whose values tell them apart, in pieces or with their dimensions in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlab.fold.assignment import Assignment
from driftlab.fold.slices import WHOLE, Slices, cut, match, order_alike, shuffled_hash, uncut, ways_to_cut

# A tensor is sought slice by slice only if about this many of its values, at even intervals, occur at all.
SAMPLE = 16


def distinct(assignment: Assignment, dtype: torch.dtype) -> list[str]:
    """Reference tensors without a place whose values tell them apart, to be sought in ``dtype``."""
    return [name for name in assignment.missing(dtype) if name not in assignment.constant]


def place_permuted(assignment: Assignment, dtype: torch.dtype) -> None:
    """Find whole tensors with permuted dimensions, reshaped or not, among those with the same values."""
    sizes = {assignment.mine[name].numel() for name in distinct(assignment, dtype)}
    by_hash: dict[int, list[str]] = {}
    for source in assignment.unused(dtype):
        tensor = assignment.theirs[source]
        if tensor.numel() in sizes and source not in assignment.touched:
            by_hash.setdefault(shuffled_hash(tensor), []).append(source)
    for name in distinct(assignment, dtype) if by_hash else []:
        mine, distances = assignment.mine[name].to(dtype), assignment.distances(name)
        alike = by_hash.get(shuffled_hash(mine), [])
        alike = [source for source in alike if assignment.theirs[source].numel() == mine.numel()]
        any(_place_permutation(assignment, name, s) for s in sorted(alike, key=distances.__getitem__))


def _place_permutation(assignment: Assignment, name: str, source: str) -> bool:
    mine, theirs = assignment.mine[name], assignment.theirs[source]
    order = order_alike(mine.to(theirs.dtype), theirs)
    if order is None:
        return False
    positions = assignment.layout.positions(source).permute(order).reshape(mine.shape)
    return assignment.place(name, positions, "value")


def place_slices(assignment: Assignment, dtype: torch.dtype) -> None:
    """Find tensors slice by slice: in a fused tensor, in several put together, in another order of channels.

    Along the first two dimensions before others, which is where layers are split and fused; in tensors with
    permuted dimensions last.
    """
    names = _plausible(assignment, dtype, distinct(assignment, dtype))
    dims = max((assignment.mine[name].dim() for name in names), default=0)
    for every_order in (False, True):
        for along in (0, 1, WHOLE, *range(2, dims)):
            _place_slices_along(assignment, dtype, names, along, every_order)


def _place_slices_along(
    assignment: Assignment, dtype: torch.dtype, names: list[str], along: int, every_order: bool
) -> None:
    left = {n: assignment.mine[n].to(dtype) for n in names if n not in assignment.placed}
    cuts = {name: slices for name, tensor in left.items() for slices in ways_to_cut(name, tensor, [along])}
    lengths = {slices.length for slices in cuts.values()}
    pool = [
        slices
        for source in (assignment.unused(dtype) if cuts else [])
        for slices in ways_to_cut(source, assignment.theirs[source], None, lengths, every_order)
    ]
    for name in sorted(cuts, key=lambda name: -left[name].numel()):
        distances = assignment.distances(name)
        near = sorted(pool, key=lambda slices: distances[slices.source])
        _place_slice_by_slice(assignment, name, cuts[name], near)


def _place_slice_by_slice(assignment: Assignment, name: str, target: Slices, pool: list[Slices]) -> None:
    pool = [slices for slices in pool if slices.length == target.length]
    found = match(target, pool, [_free_slices(assignment, slices) for slices in pool])
    if found is None:
        return
    which, row = found
    numbers = which.unique().tolist()
    positions = torch.empty(len(target.hashes), target.length, dtype=torch.int64)
    for number in numbers:
        theirs = cut(assignment.layout.positions(pool[number].source), pool[number].order)
        positions[which == number] = theirs[row[which == number]]
    # Slices of one tensor cut in two ways may overlap; an element can only serve once.
    cut_twice = len({pool[number].source for number in numbers}) < len(numbers)
    if cut_twice and len(positions.unique()) < positions.numel():
        return
    shape = tuple(assignment.mine[name].shape)
    assignment.place(name, uncut(positions, target.order, shape), "value")


def _free_slices(assignment: Assignment, slices: Slices) -> Tensor:
    if slices.source not in assignment.touched:
        return torch.ones(len(slices.hashes), dtype=torch.bool)
    return cut(assignment.free_of(slices.source), slices.order).all(dim=1)


def place_blocks(assignment: Assignment, dtype: torch.dtype) -> None:
    """Find tensors that were cut along several dimensions at once: all blocks in their place, or none."""
    for name in _plausible(assignment, dtype, distinct(assignment, dtype)):
        mine, distances = assignment.mine[name].to(dtype), assignment.distances(name)
        positions = torch.full_like(mine, -1, dtype=torch.int64)
        for source in sorted(assignment.unused(dtype), key=distances.__getitem__):
            _fill_block(assignment, mine, source, positions)
        if bool((positions >= 0).all()):
            assignment.place(name, positions, "value")


def _fill_block(assignment: Assignment, mine: Tensor, source: str, positions: Tensor, tries: int = 8) -> None:
    block = assignment.theirs[source]
    inside = block.dim() == mine.dim() and all(b <= m for b, m in zip(block.shape, mine.shape, strict=True))
    if not inside or source in assignment.touched:
        return
    for corner in (mine == block.reshape(-1)[0]).nonzero()[:tries].tolist():
        window = tuple(slice(c, c + size) for c, size in zip(corner, block.shape, strict=True))
        if torch.equal(mine[window], block) and bool((positions[window] < 0).all()):
            positions[window] = assignment.layout.positions(source)
            return


def _plausible(assignment: Assignment, dtype: torch.dtype, names: list[str]) -> list[str]:
    """Those of which a sample of values occurs somewhere: spares the hashing where there is no hope."""
    known = [_numbers(assignment.theirs[source]) for source in assignment.unused(dtype)]
    if not names or not known:
        return []
    samples = [_numbers(assignment.mine[name].to(dtype)) for name in names]
    samples = [sample[:: max(1, len(sample) // SAMPLE)].contiguous() for sample in samples]
    wanted = torch.cat(samples).unique()
    seen = torch.zeros(len(wanted), dtype=torch.bool)
    for numbers in known:
        nearest = torch.searchsorted(wanted, numbers).clamp_(max=len(wanted) - 1)
        seen[nearest[wanted[nearest] == numbers]] = True
    occur = [seen[torch.searchsorted(wanted, sample)] for sample in samples]
    return [name for name, hits in zip(names, occur, strict=True) if bool(hits.all())]


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).to(torch.float64 if tensor.is_floating_point() else torch.int64)
