"""What a tensor is recognised by, in any order and layout: its size, and four sums over its numbers.

Two networks that compute the same function need not hold the same tensors: one has q, k and v in one matrix,
the other has them apart, or each head by itself. So a tensor's slices along its short axes are kept as well,
and one whose slices are all there is there.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.arithmetic.shadow import held
from driftlab.tracing.rows import Rows

Print = tuple[int, float, float, float, float]  # size, sums of |x|, x^2, x, x |x|
# Two float64 computations of the same values agree to more digits than this, deep networks included.
AGREE = 1e-9
# A value that a small fault moved (an epsilon) is still itself, two layers' are further apart: of what may be
# taken for another it must be near, of what a fault began with it need be less so.
NEARLY, ABOUT = 1e-4, 1e-2
# Heads, parts of a fused matrix, experts: what is split is split in few. Large tensors are not sliced, which
# would take longer than computing them.
SLICES, SMALLEST, LARGEST = 32, 4, 2**18


@dataclass(frozen=True)
class Prints:
    """Of a tensor, and of its slices: one list an axis.

    Attributes:
        kept: of those of its rows that another network has, where that leaves some out.
    """

    whole: Print
    slices: tuple[tuple[Print, ...], ...] = ()
    kept: Prints | None = None

    def apart(self, other: Prints) -> float:
        """How far the two are apart, relative; 0 where it is no number of its own."""
        if self.whole[0] != other.whole[0] or not self.telling:
            return 0.0
        (_, *own), (_, *others) = self.whole, other.whole
        sizes = own[0], own[1], own[0], own[1]
        return max(abs(a - b) / s for a, b, s in zip(own, others, sizes, strict=True))

    def same(self, other: Prints, within: float = AGREE) -> bool:
        """Whether it has as many numbers, and they are its, in any order."""
        return self.whole[0] == other.whole[0] and self.apart(other) <= within

    @property
    def telling(self) -> bool:
        """Whether its numbers differ, so that hardly another tensor has the same (no ones, no scalar)."""
        size, absolute, squares, *_ = self.whole
        return size * squares - absolute**2 > 1e-6 * size * squares


def of_zeros_and_ones(values: Tensor) -> bool:
    """Whether it holds nothing else, as a mask does."""
    return bool(((values == 0) | (values == 1)).all())


def prints(tensor: Tensor, rows: Rows | None = None, sliced: bool = True) -> Prints | None:
    """None of what holds no floating number. A number that stands for minus infinity counts as one.

    Args:
        rows: those that the other network has.
        sliced: whether slices are told apart as well.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_nested or not tensor.numel():
        return None
    with _disable_current_modes(), torch.no_grad():
        values = held(tensor.detach())
        values = values.to_dense() if values.layout is not torch.strided else values
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        kept = rows.of(values) if rows else None
        return replace(_prints(values, sliced), kept=None if kept is None else _prints(kept, sliced))


def _prints(values: Tensor, sliced: bool) -> Prints:
    values = values.double().squeeze()
    values = torch.where(values.abs() < 1e8, values, 0.0)
    return Prints(_along(values, None)[0], tuple(_along(values, a) for a in _sliced(values) if sliced))


def same_numbers(one: Prints | None, other: Prints | None) -> bool:
    """Whether both hold floating numbers, and the same ones."""
    return one is not None and other is not None and one.same(other)


def _sliced(values: Tensor) -> list[int]:
    if values.dim() < 2 or values.numel() > LARGEST:
        return []
    return [a for a, n in enumerate(values.shape) if n <= SLICES and values.numel() // n >= SMALLEST]


def _same(own: Sequence[Print], other: Sequence[Print], within: float) -> bool:
    if len(own) != len(other) or own[0][0] != other[0][0]:
        return False
    return all(
        abs(a - b) <= within * size
        for (_, *mine), (_, *theirs) in zip(own, other, strict=True)
        for a, b, size in zip(mine, theirs, (mine[0], mine[1], mine[0], mine[1]), strict=True)
    )


def _along(values: Tensor, axis: int | None) -> tuple[Print, ...]:
    rows = values.reshape(1, -1) if axis is None else values.movedim(axis, 0).flatten(1)
    return tuple((rows.shape[1], *row) for row in sums(rows).tolist())


def sums(rows: Tensor) -> Tensor:
    """[rows, numbers] -> [rows, 4]."""
    size = rows.abs()
    return torch.stack((size.sum(1), (rows * rows).sum(1), rows.sum(1), (rows * size).sum(1)), 1)


@dataclass
class Seen:
    """Every tensor that a network made on its way, and their slices, to be looked up."""

    _by_size: dict[int, list[tuple[float, float, float, float, int]]] = field(default_factory=dict)
    _sorted: bool = False

    def add(self, found: Prints | None, number: int, whole: bool = False) -> None:
        """``whole``: without its slices."""
        slices = () if whole or not found else (p for axis in found.slices for p in axis)
        for size, *numbers in (found.whole, *slices) if found else ():
            self._by_size.setdefault(size, []).append((*numbers, number))
        if found and found.kept:
            self.add(found.kept, number)
        self._sorted = False

    def has(self, wanted: Prints, within: float = AGREE) -> bool:
        """Whether it was made, whole or in slices."""
        if self.find(wanted.whole, within):
            return True
        if any(all(self.find(p, within) for p in axis) for axis in wanted.slices):
            return True
        return wanted.kept is not None and self.has(wanted.kept, within)

    def find_whole(self, wanted: Prints, within: float = AGREE) -> list[int]:
        """The numbers of those that look like it, or like those of its rows that this network has."""
        kept = wanted.kept
        return self.find(wanted.whole, within) or (self.find_whole(kept, within) if kept else [])

    def in_another_order(self, wanted: Prints, values: Sequence[Prints | None], within: float) -> bool:
        """Whether its slices along an axis are there in another order alone."""
        found = [p.slices for n in self.find(wanted.whole, within) if (p := values[n]) is not None]
        axes = [axis for slices in found for axis in slices]
        for own in wanted.slices:
            alike = [axis for axis in axes if _same(sorted(own), sorted(axis), within)]
            if alike and not any(_same(own, axis, within) for axis in alike):
                return True
        return False

    def find(self, wanted: Print, within: float = AGREE) -> list[int]:
        """The numbers of those that look like it."""
        if not self._sorted:
            for rows in self._by_size.values():
                rows.sort()
            self._sorted = True
        size, absolute, squares, total, signed = wanted
        rows, found = self._by_size.get(size, []), []
        margin, squared = within * absolute, within * squares
        for at in range(bisect.bisect_left(rows, (absolute - margin,)), len(rows)):
            first, second, third, fourth, number = rows[at]
            if first > absolute + margin:
                break
            alike = abs(squares - second) <= squared and abs(total - third) <= margin
            if alike and abs(signed - fourth) <= squared:
                found.append(number)
        return found
