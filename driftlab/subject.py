"""The pair under examination: two networks, how they are called, their loss and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.calling import Call, whole
from driftlab.distance import relative_distance
from driftlab.fold import Fold
from driftlab.modules import paired_modules
from driftlab.probes.arithmetic import Recorded, whole_network
from driftlab.probes.locating import Local
from driftlab.probes.recording import record
from driftlab.unfold import floating_tensors


@dataclass
class Subject:
    """Reference and candidate, in float32, from the same start.

    Attributes:
        optimizer, candidate_optimizer: make the optimizer of a module.
        call: how a network takes its inputs.
        pairs: names of the reference's modules -> those of the candidate's that stand for them.
        written_otherwise: the reference's parameters that the candidate does not hold with the same values
            (scaled, reparametrised, or another start).
    """

    reference: nn.Module
    candidate: nn.Module
    fold: Fold
    loss: Callable[[object, object], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    candidate_optimizer: Callable[[nn.Module], Optimizer]
    call: Call = whole
    seed: int = 0
    pairs: Mapping[str, str] = field(init=False)
    written_otherwise: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.pairs = paired_modules(self.reference, self.candidate, self.fold.sources)
        self.written_otherwise = _written_otherwise(self.reference, self.candidate, self.fold)

    def comparable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fold, less the parameters that the candidate writes otherwise: they never were equal."""
        return {n: t for n, t in self.fold(tensors).items() if n not in self.written_otherwise}

    def reference_name(self, candidate_name: str | None) -> str | None:
        """The reference's module that a module of the candidate is, or lies in."""
        theirs = {other: name for name, other in self.pairs.items()}
        while candidate_name and candidate_name not in theirs:
            candidate_name = candidate_name.rpartition(".")[0]
        return theirs[candidate_name] if candidate_name is not None else None

    def on(self, batch: tuple[object, object]) -> Recorded:
        """The whole network on one batch."""
        return whole_network(self.call, self.loss, *batch)

    def local(self, batch: tuple[object, object]) -> Local:
        """Every pair of modules, with what the reference's module is given on this batch."""
        calls = record(self.reference, self.on(batch), self.seed)
        try:
            theirs = record(self.candidate, self.on(batch), self.seed)
        except Exception:  # code that takes no hooks (vmap)
            theirs = None
        return Local(
            self.reference, self.candidate, self.fold, self.pairs, calls, theirs, self.seed, self.comparable
        )


# A weight that is off by less means the same and has another value; by more, it may mean something else.
ANOTHER_FORM = 1e-3


def in_another_form(subject: Subject) -> list[str]:
    """Those of ``written_otherwise`` that are far from the reference's values, or nowhere to be found."""
    folded, mine = subject.fold(floating_tensors(subject.candidate)), floating_tensors(subject.reference)
    return [
        n
        for n in subject.written_otherwise
        if n not in folded
        or folded[n].shape != mine[n].shape
        or not float(relative_distance(folded[n].double(), mine[n].double())) < ANOTHER_FORM
    ]


def _written_otherwise(reference: nn.Module, candidate: nn.Module, fold: Fold) -> list[str]:
    folded = fold(floating_tensors(candidate))
    found = []
    for name, parameter in reference.named_parameters():
        other = folded.get(name)
        same = other is not None and other.shape == parameter.shape
        # a dtype of fewer bits holds the same value as well as it can
        if not same or not bool((other == parameter.detach().to(other)).all()):
            found.append(name)
    return found
