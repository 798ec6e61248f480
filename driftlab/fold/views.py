"""How a reference tensor is read out of the candidate's: as views where it can be, else by an index.

Finding a fold yields positions, one an element; applying one must not gather eleven million elements one by
one. So positions become strided views, concatenated along one dimension, and are kept only if that fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from driftlab.fold.layout import Layout, Tensors

# More pieces than this are quicker to gather than to concatenate.
MOST_PIECES = 64


@dataclass(eq=False)
class View:
    """A strided view of one candidate tensor; along ``dim`` its slices are picked by ``index``, if given.

    ``whole`` says that it is the source itself, as it stands.
    """

    source: str
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    dim: int = 0
    index: Tensor | None = None
    whole: bool = field(init=False)

    def __post_init__(self) -> None:
        dense = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        same = self.shape == self.source_shape and self.index is None
        self.whole = same and all(size == 1 or stride == expected for size, stride, expected in dense)

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the candidate tensors that it reads."""
        return {self.source: self.source_shape}

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of what ``take`` returns."""
        if self.index is None:
            return self.shape
        return (*self.shape[: self.dim], len(self.index), *self.shape[self.dim + 1 :])

    def take(self, tensors: Tensors) -> Tensor:
        tensor = tensors[self.source]
        if self.whole:
            return tensor
        flat = tensor.contiguous().view(-1)  # reshape(-1) may give a view with gaps
        seen = flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)
        if self.index is None:
            return seen
        self.index = self.index.to(tensor.device)  # moves once: an experiment stays on its device
        return seen.index_select(self.dim, self.index)


@dataclass(eq=False)
class Joined:
    """Views, or joined views, end to end along a dimension; what is not given counts as zero."""

    dim: int
    pieces: tuple[View | Joined, ...]

    @property
    def sources(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for piece in self.pieces for name, shape in piece.sources.items()}

    @property
    def result(self) -> tuple[int, ...]:
        shapes = [piece.result for piece in self.pieces]
        return tuple(sum(s[d] for s in shapes) if d == self.dim else n for d, n in enumerate(shapes[0]))

    def take(self, tensors: Tensors) -> Tensor:
        some = next(tensors[name] for name in self.sources if name in tensors)
        pieces = [
            some.new_zeros(p.result) if tensors.keys().isdisjoint(p.sources) else p.take(tensors)
            for p in self.pieces
        ]
        return torch.cat(pieces, dim=self.dim)


@dataclass(eq=False)
class Gathered:
    """The last resort: element by element, index[i, ...] counting through ``sources`` laid end to end."""

    sources: dict[str, tuple[int, ...]]
    index: Tensor

    def take(self, tensors: Tensors) -> Tensor:
        some = next(tensors[name] for name in self.sources if name in tensors)
        flat = [
            (tensors[n] if n in tensors else some.new_zeros(s)).reshape(-1) for n, s in self.sources.items()
        ]
        self.index = self.index.to(some.device)
        return torch.cat(flat)[self.index]


Placement = View | Joined | Gathered


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def whole(name: str, shape: tuple[int, ...]) -> View:
    """The candidate tensor as it stands."""
    return View(name, shape, shape, contiguous_strides(shape), 0)


def placement(positions: Tensor, layout: Layout) -> Placement:
    """How to read a reference tensor, given the position of each of its elements, int64 in its shape."""
    owners = layout.owners(positions)
    return _joined(positions, owners, layout) or _gathered(positions, owners, layout)


def _joined(positions: Tensor, owners: Tensor, layout: Layout) -> Joined | View | None:
    """Views, cut along one dimension after the other until each has one source; None if one is no view."""
    if bool((owners == owners.reshape(-1)[0]).all()):
        return _view(positions, layout)
    for dim in range(positions.dim()):
        sizes = _runs(owners, dim)
        if 1 < len(sizes) <= MOST_PIECES:
            chunks = zip(positions.split(sizes, dim), owners.split(sizes, dim), strict=True)
            pieces = [_joined(*chunk, layout) for chunk in chunks]
            return Joined(dim, tuple(pieces)) if all(pieces) else None
    return None


def _runs(owners: Tensor, dim: int) -> list[int]:
    """Sizes along ``dim`` of the runs of slices that come from the same tensors."""
    rows = owners.movedim(dim, 0).reshape(owners.shape[dim], -1)
    changes = (rows[1:] != rows[:-1]).any(dim=1).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), len(rows)]
    return [stop - start for start, stop in pairwise(bounds)]


def _view(positions: Tensor, layout: Layout) -> View | None:
    """One tensor's elements as a strided view, or as one whose slices are picked; None if it is neither."""
    owner = layout.owner(int(layout.owners(positions.reshape(-1)[:1])))
    local = positions - layout.starts[owner]
    strides, shape = _strides(local), tuple(local.shape)
    if min(strides, default=0) >= 0 and bool((_affine(local, strides) == local).all()):
        return View(owner, layout.shapes[owner], shape, strides, int(local.reshape(-1)[0]))
    views = (_picked(local, strides, dim, owner, layout) for dim in range(local.dim()))
    return next((view for view in views if view), None)


def _picked(local: Tensor, strides: tuple[int, ...], dim: int, owner: str, layout: Layout) -> View | None:
    """Slices along ``dim`` in any order, each with the same strides along the other dimensions."""
    others = tuple(0 if d == dim else stride for d, stride in enumerate(strides))
    offsets = local.movedim(dim, 0).reshape(local.shape[dim], -1)[:, 0]
    column = offsets.view([-1 if d == dim else 1 for d in range(local.dim())])
    if min(others) < 0 or bool((_affine(local, others) - local.reshape(-1)[0] + column != local).any()):
        return None
    first = int(offsets.min())
    step = max(math.gcd(*(offsets - first).unique().tolist()), 1)
    index = (offsets - first) // step
    shape = [*local.shape[:dim], int(index.max()) + 1, *local.shape[dim + 1 :]]
    steps = [*others[:dim], step, *others[dim + 1 :]]
    return View(owner, layout.shapes[owner], tuple(shape), tuple(steps), first, dim, index)


def _strides(positions: Tensor) -> tuple[int, ...]:
    first = positions.reshape(-1)[0]
    corners = [
        positions.movedim(d, 0).reshape(n, -1)[min(1, n - 1), 0] for d, n in enumerate(positions.shape)
    ]
    return tuple(int(corner - first) for corner in corners)


def _affine(positions: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What the positions would be, did they follow from the first one by ``strides``."""
    total = positions.reshape(-1)[0]
    for dim, (size, stride) in enumerate(zip(positions.shape, strides, strict=True)):
        steps = torch.arange(size) * stride
        total = total + steps.view([-1 if d == dim else 1 for d in range(positions.dim())])
    return total


def _gathered(positions: Tensor, owners: Tensor, layout: Layout) -> Gathered:
    index, sources, size = torch.empty_like(positions), {}, 0
    for number in owners.unique().tolist():
        name, mine = layout.owner(number), owners == number
        index[mine] = positions[mine] - layout.starts[name] + size
        sources[name] = layout.shapes[name]
        size += math.prod(layout.shapes[name])
    return Gathered(sources, index)
