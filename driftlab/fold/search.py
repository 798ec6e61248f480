"""Finding the reference's tensors among the candidate's by their values, and failing that by their names.

First what has the same name and is equal; then tensors whose values tell them apart, whole, as slices of a
fused tensor, as several put together, transposed, reshaped, or with channels in another order; then tensors
that are all one number (BatchNorm's ones, zero biases), which only their place among the others tells apart.
"""

from __future__ import annotations

import difflib
import math

import torch
from torch import Tensor

from driftlab.fold.assignment import Assignment, same_values
from driftlab.fold.pieces import distinct, place_blocks, place_permuted, place_slices
from driftlab.fold.slices import whole_hash


def place_by_value(assignment: Assignment) -> None:
    """Place the tensors whose values, cast to the candidate's dtype, are found exactly."""
    for name in assignment.missing():
        source = assignment.namesake(name)
        if source is not None and same_values(assignment.mine[name], assignment.theirs[source]):
            assignment.place_whole(name, source, "value")
    for dtype in dict.fromkeys(tensor.dtype for tensor in assignment.theirs.values()):
        if not dtype.is_complex:
            _place_distinct(assignment, dtype)
            _place_constant(assignment, dtype)


def place_by_name(assignment: Assignment) -> None:
    """Place what has the name and shape of a candidate tensor that is still free, whatever its values."""
    for name in assignment.missing():
        source = assignment.namesake(name)
        if source is not None:
            assignment.place_whole(name, source, "name")


def _place_distinct(assignment: Assignment, dtype: torch.dtype) -> None:
    _place_whole(assignment, dtype, distinct(assignment, dtype))
    place_permuted(assignment, dtype)
    place_slices(assignment, dtype)
    place_blocks(assignment, dtype)


def _place_constant(assignment: Assignment, dtype: torch.dtype) -> None:
    for name in assignment.missing(dtype):
        if name in assignment.constant and name.endswith("bias"):
            _place_beside_weight(assignment, name)
    constant = [name for name in assignment.missing(dtype) if name in assignment.constant]
    # A namesake it is, whatever its value became: any other constant of that shape would be a guess.
    _place_whole(assignment, dtype, [name for name in constant if assignment.namesake(name) is None])


def _place_whole(assignment: Assignment, dtype: torch.dtype, names: list[str]) -> None:
    """Pair tensors with equal values in flat order; those that have one counterpart first."""
    groups: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for name in names:
        tensor = assignment.mine[name].to(dtype)
        groups.setdefault((tensor.numel(), whole_hash(tensor)), ([], []))[0].append(name)
    sizes = {size for size, _ in groups}
    for source in assignment.unused(dtype):
        tensor = assignment.theirs[source]
        if tensor.numel() in sizes and source not in assignment.touched:
            key = tensor.numel(), whole_hash(tensor)
            groups.get(key, ([], []))[1].append(source)
    for mine, theirs in sorted(groups.values(), key=lambda group: len(group[0]) * len(group[1])):
        _pair(assignment, mine, theirs)


def _pair(assignment: Assignment, mine: list[str], theirs: list[str]) -> None:
    """One to one, likeliest first: by kind, shape, last part of the name, order of definition, whole name."""
    pairs = []
    for name in mine:
        distances, parameter = assignment.distances(name), name in assignment.reference.parameters
        for source in theirs:
            # A constant is no evidence that a parameter became a buffer.
            other_kind = parameter != (source in assignment.candidate.parameters)
            if name in assignment.constant and other_kind:
                continue
            other_shape = assignment.mine[name].shape != assignment.theirs[source].shape
            other_leaf = name.rpartition(".")[2] != source.rpartition(".")[2]
            unlike = -difflib.SequenceMatcher(None, name, source).ratio()
            pairs.append((other_kind, other_shape, other_leaf, distances[source], unlike, name, source))
    for *_, name, source in sorted(pairs):
        if name not in assignment.placed:
            positions = assignment.layout.positions(source).reshape(assignment.mine[name].shape)
            assignment.place(name, positions, "value")


def _place_beside_weight(assignment: Assignment, name: str) -> None:
    """Take a constant bias [n] from beside where the n slices of the weight that it belongs to came from."""
    weight = assignment.placed.get(name.removesuffix("bias") + "weight")
    if weight is None or assignment.mine[name].dim() != 1:
        return
    # Reading the weight out of positions instead of values tells where its elements come from.
    positions = weight.take({source: assignment.layout.positions(source) for source in weight.sources})
    count = len(assignment.mine[name])
    for dim in (dim for dim, size in enumerate(positions.shape) if size == count):
        rows, biases = positions.movedim(dim, 0).reshape(count, -1), torch.full((count,), -1)
        for source, shape in weight.sources.items():
            local = rows - assignment.layout.starts[source]
            owned = (local >= 0) & (local < math.prod(shape))
            _fill_biases(assignment, source.removesuffix("weight") + "bias", shape, local, owned, biases)
        if bool((biases >= 0).all()) and assignment.place(name, biases, "value"):
            return


def _fill_biases(
    assignment: Assignment, bias: str, shape: tuple[int, ...], local: Tensor, owned: Tensor, biases: Tensor
) -> None:
    """Fill in the rows whose first element a source owns, along the dimension of it that tells rows apart."""
    rows = owned[:, 0]
    for dim, size in enumerate(shape):
        index = local // math.prod(shape[dim + 1 :]) % size
        one_index_a_row = bool(((index == index[:, :1]) | ~owned)[rows].all())
        distinct = len(index[rows, 0].unique()) == int(rows.sum())
        if one_index_a_row and distinct and assignment.layout.shapes.get(bias) == (size,):
            biases[rows] = assignment.layout.starts[bias] + index[rows, 0]
            return
