"""The fold: how the candidate's tensors map back to the reference's names and shapes, given or found.

Every distance between candidate and reference is taken after folding. A rewrite that knows its fold hands it
over as ``candidate.fold``. Any other is found: by *tags* where the rewrite can be run once more, on serial
numbers in place of weights; else by *value*, from the equal weights that the two start from; else by *name*.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from driftlab.blame import not_ours
from driftlab.fold.assignment import Assignment
from driftlab.fold.given import given_fold
from driftlab.fold.layout import FoldError, NamedTensors, Rewrite, Tensors, named_tensors
from driftlab.fold.search import place_by_name, place_by_value
from driftlab.fold.tags import positions_by_tags
from driftlab.fold.views import Gathered, Joined, Placement, View, whole

__all__ = ["Fold", "FoldError", "find_fold"]


@dataclass(frozen=True, eq=False)
class Fold:
    """From the candidate's tensors, by name, to the reference's names and shapes.

    Serves weights, gradients, buffers and momentum alike. Names are the first ones of shared tensors, as
    ``named_parameters()`` and ``named_buffers()`` give them, and come in the reference's order.

    Attributes:
        read: what a call comes down to.
        placed: the reference's tensors that it gives.
        unplaced: the reference's tensors that it cannot give.
        unused: the candidate's tensors that nothing is taken from.
        origin: "given", "by tags", "by value" or "by name": how most of the elements were placed.
        notes: what a reader should know, a line each.
        repeated: the reference's tensors that are seen in several places of the candidate.
        is_identity: names and shapes pass through as they are.
    """

    read: Callable[[Tensors], dict[str, Tensor]]
    placed: tuple[str, ...]
    unplaced: tuple[str, ...]
    unused: tuple[str, ...]
    origin: str
    notes: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    is_identity: bool = False

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        """The reference's tensors that can be had from ``tensors``, detached; views of them where possible.

        Where only some pieces of a tensor are given, the others count as zero (a parameter that got no
        gradient); where none is, it is left out.

        Raises:
            FoldError: one of ``tensors`` has not the shape that the candidate's tensor of that name has.
        """
        return self.read(tensors)

    def sources(self, name: str) -> frozenset[str]:
        """The candidate's tensors that the reference's ``name`` is taken from; none where it has no place."""
        return self.read.sources.get(name, frozenset())

    def reorders(self, name: str) -> bool:
        """Whether the slices of the reference's ``name`` lie in another order in the candidate."""
        return (
            isinstance(self.read, _Read) and name in self.placed and _is_reordered(self.read.placements[name])
        )


def find_fold(reference: nn.Module, candidate: nn.Module, rewrite: Rewrite | None = None) -> Fold:
    """The fold from ``candidate`` to ``reference``, which start from the same weights.

    A callable ``candidate.fold`` (tensors by name -> tensors by name) is taken, once checked. Otherwise, and
    where it is a method with other arguments, the fold is found; the dtypes of the two may differ. Neither
    module is changed, nor torch's random state.

    Args:
        rewrite: what made the candidate, given a deep copy of the reference; it is run once more if need be.

    Raises:
        FoldError: ``candidate.fold`` does not give the reference's names and shapes, or a network is lazy.
    """
    mine, theirs = named_tensors(reference), named_tensors(candidate)
    if (given := _own_fold(candidate)) is not None:
        return _given(given, mine, theirs, set(reference.state_dict()))
    assignment, notes = Assignment(mine, theirs), _ties(mine, theirs)
    doubtful = _place_by_tags(assignment, reference, rewrite, notes) if rewrite else {}
    place_by_value(assignment)
    for name in doubtful.keys() & assignment.missing():
        assignment.place(name, doubtful[name], "tags", exact=False)
    place_by_name(assignment)
    return _found(assignment, notes + _remarks(assignment))


def _own_fold(candidate: nn.Module) -> Callable[[Tensors], Tensors] | None:
    """What the candidate gives as its fold; a method of that name with other arguments is something else."""
    given = getattr(candidate, "fold", None)
    if not callable(given) or isinstance(given, nn.Module):
        return None
    try:
        inspect.signature(given).bind({})
    except TypeError:
        return given if "fold" in vars(candidate) else None  # what was put there was meant
    except ValueError:  # a builtin without a signature
        pass
    return given


def identity_fold(module: nn.Module) -> Fold:
    """From a network's tensors to themselves."""
    shapes = {name: tuple(t.shape) for name, t in named_tensors(module).tensors.items()}
    read = _Read({name: whole(name, shape) for name, shape in shapes.items()}, shapes)
    return Fold(read, tuple(shapes), (), (), "by name", is_identity=True)


@dataclass(frozen=True, eq=False)
class _Read:
    """Reads every reference tensor out of the candidate's."""

    placements: dict[str, Placement]
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def sources(self) -> dict[str, frozenset[str]]:
        """Reference name -> the candidate tensors that it is read out of."""
        return {name: frozenset(placed.sources) for name, placed in self.placements.items()}

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        for name, tensor in given.items():
            if tensor.shape != self.shapes.get(name, tensor.shape):
                raise FoldError(
                    f"{name} is {list(tensor.shape)}, but {list(self.shapes[name])} in the candidate"
                )
        read = ((n, p) for n, p in self.placements.items() if not given.keys().isdisjoint(p.sources))
        return {name: placement.take(given) for name, placement in read}


def _given(fold: Callable, mine: NamedTensors, theirs: NamedTensors, needed: set[str]) -> Fold:
    read = given_fold(fold, mine, theirs, needed & mine.tensors.keys())
    used = frozenset().union(*read.sources.values())
    passed = all(read.outputs.get(name) == name and read.sources[name] == {name} for name in mine.tensors)
    folded = read(theirs.tensors)
    return Fold(
        read,
        placed=tuple(read.outputs),
        unplaced=tuple(name for name in mine.tensors if name not in read.outputs),
        unused=tuple(name for name in theirs.tensors if name not in used),
        origin="given",
        notes=tuple(_ties(mine, theirs)),
        is_identity=passed and all(torch.equal(folded[name], theirs.tensors[name]) for name in folded),
    )


def _found(assignment: Assignment, notes: list[str]) -> Fold:
    placements = {name: assignment.placed[name] for name in assignment.mine if name in assignment.placed}
    elements = Counter({"tags": 0, "value": 0, "name": 0})
    for name, how in assignment.how.items():
        elements[how] += assignment.mine[name].numel()
    unused = tuple(name for name in assignment.theirs if name not in assignment.touched)
    passed = all(isinstance(p, View) and p.whole and p.source == name for name, p in placements.items())
    return Fold(
        _Read(placements, assignment.layout.shapes),
        placed=tuple(placements),
        unplaced=tuple(assignment.missing()),
        unused=unused,
        origin=f"by {elements.most_common(1)[0][0]}",
        notes=tuple(notes),
        repeated=tuple(assignment.repeated),
        is_identity=passed and not assignment.missing(),
    )


def _place_by_tags(
    assignment: Assignment, reference: nn.Module, rewrite: Rewrite, notes: list[str]
) -> dict[str, Tensor]:
    """Place what the tags show; returns what they show, but the candidate's values do not bear out."""
    try:
        positions, assignment.repeated = positions_by_tags(reference, rewrite, assignment.layout)
    except Exception as error:  # any rewrite may refuse weights that are no weights
        not_ours(error)
        notes.append(
            f"the rewrite raised {type(error).__name__} on serial numbers for weights: found by value"
        )
        return {}
    if assignment.repeated:
        where = "in several places in the candidate, of which the first is taken"
        notes.append(f"{where}: {listed(assignment.repeated)}")
    return {name: where for name, where in positions.items() if not assignment.place(name, where, "tags")}


def _ties(mine: NamedTensors, theirs: NamedTensors) -> list[str]:
    """Tensors that are shared on one side only."""
    notes = []
    sides = ((mine, theirs, "reference", "candidate"), (theirs, mine, "candidate", "reference"))
    for one, other, tied, separate in sides:
        for alias, first in one.aliases.items():
            names = other.first_name(alias), other.first_name(first)
            if None not in names and names[0] != names[1]:
                notes.append(f"{alias} is tied to {first} in the {tied} but separate in the {separate}")
    return notes


def _remarks(assignment: Assignment) -> list[str]:
    """What is uncertain about what was found."""
    notes = []
    by_name = [name for name in assignment.mine if assignment.how.get(name) == "name"]
    if by_name:
        notes.append(f"placed by name only, for the values differ: {listed(by_name)}")
    for source in assignment.theirs:
        free = int(assignment.free_of(source).sum()) if source in assignment.touched else 0
        if free:
            shape = list(assignment.layout.shapes[source])
            notes.append(f"{source} {shape}: {free} of its elements are taken for nothing")
    reordered = any(_is_reordered(p) for p in assignment.placed.values())
    constant = [n for n in assignment.mine if n in assignment.constant and assignment.how.get(n) == "value"]
    constant = [name for name in constant if assignment.mine[name].numel() > 1]
    if reordered and constant:
        notes.append(
            f"channels change their order, and that of constant tensors is a guess: {listed(constant)}"
        )
    return notes


def _is_reordered(placed: Placement) -> bool:
    if isinstance(placed, Joined):
        return any(map(_is_reordered, placed.pieces))
    return isinstance(placed, Gathered) or placed.index is not None


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
