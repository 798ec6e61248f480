"""A fold that comes with the candidate: checked once, and made to serve where only some tensors are given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlab.blame import described, theirs
from driftlab.fold.layout import AnyFold, FoldError, NamedTensors, Tensors
from driftlab.refusing import shown


@dataclass(frozen=True, eq=False)
class GivenFold:
    """Calls ``fold`` on all the candidate's tensors, zeros in place of those that are not at hand.

    So a fold that knows only how to join two halves serves for weights, gradients and buffers alike.

    Attributes:
        fold: as it was given.
        outputs: reference name -> the name that ``fold`` gives it.
        sources: reference name -> the candidate tensors that it depends on.
        shapes: of the candidate's tensors.
        aliases: other names of shared ones -> their first names.
    """

    fold: AnyFold
    outputs: dict[str, str]
    sources: dict[str, frozenset[str]]
    shapes: dict[str, torch.Size]
    aliases: dict[str, str]

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        """The reference's tensors that depend on any of ``tensors``, in the reference's order."""
        if not tensors:
            return {}
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        zero = next(iter(given.values())).new_zeros(())
        whole = {name: given.get(name, zero.expand(shape)) for name, shape in self.shapes.items()}
        folded = self.fold(given | whole | {alias: whole[name] for alias, name in self.aliases.items()})
        wanted = (name for name, sources in self.sources.items() if not sources.isdisjoint(given))
        return {name: folded[self.outputs[name]] for name in wanted}


def given_fold(
    fold: AnyFold, reference: NamedTensors, candidate: NamedTensors, needed: set[str]
) -> GivenFold:
    """``fold``, checked on the candidate's state.

    Args:
        needed: the reference's tensors that it has to give; the others may be missing.

    Raises:
        FoldError: it raises, returns no mapping, lacks a needed tensor, or gives one in another shape.
    """
    state = _with_aliases(candidate, candidate.tensors)
    folded = _called(fold, state)
    outputs = {}
    for name, tensor in reference.tensors.items():
        other = next((n for n in _names(reference, name) if n in folded), None)
        if other is None and name in needed:
            near = ", ".join(difflib.get_close_matches(name, folded, n=3, cutoff=0) or ["nothing"])
            raise FoldError(f"the candidate's fold gives no {name} {list(tensor.shape)}; it gives {near}")
        if other is not None and folded[other].shape != tensor.shape:
            shapes = f"{list(folded[other].shape)}, which is {list(tensor.shape)} in the reference"
            raise FoldError(f"the candidate's fold gives {name} the shape {shapes}")
        if other is not None:
            outputs[name] = other
    shapes = {name: tensor.shape for name, tensor in candidate.tensors.items()}
    sources = _sources(fold, outputs, candidate)
    return GivenFold(fold, outputs, sources, shapes, candidate.aliases)


def _called(fold: AnyFold, state: dict[str, Tensor]) -> Tensors:
    try:
        folded = theirs(fold, state)
    except Exception as error:
        raise FoldError(f"the candidate's fold raised {described(error)} on its own tensors") from error
    if not isinstance(folded, Mapping):
        raise FoldError(
            f"the candidate's fold gives a {type(folded).__name__}; return a dict of name -> tensor"
        )
    for name, tensor in folded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            pair = f"{shown(name)}: a {type(tensor).__name__}"
            raise FoldError(f"the candidate's fold gives {{{pair}}}; return a dict of name -> tensor")
    return folded


def _sources(fold: AnyFold, outputs: dict[str, str], candidate: NamedTensors) -> dict[str, frozenset[str]]:
    """What each output depends on, by differentiating the fold; on everything where it cuts the graph."""
    leaves = {
        n: torch.zeros(t.shape, device=t.device, requires_grad=True) for n, t in candidate.tensors.items()
    }
    sources = {name: frozenset(leaves) for name in outputs}
    try:
        with torch.enable_grad():
            folded = _called(fold, _with_aliases(candidate, leaves))
    except FoldError:  # it looks at the values, and takes offence at zeros
        return sources
    for name, other in outputs.items():
        if other in folded and folded[other].requires_grad:
            gradients = torch.autograd.grad(folded[other].sum(), list(leaves.values()), allow_unused=True)
            sources[name] = frozenset(n for n, g in zip(leaves, gradients, strict=True) if g is not None)
    return sources


def _with_aliases(candidate: NamedTensors, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {alias: tensors[name] for alias, name in candidate.aliases.items()}


def _names(named: NamedTensors, name: str) -> list[str]:
    return [name, *(alias for alias, first in named.aliases.items() if first == name)]
