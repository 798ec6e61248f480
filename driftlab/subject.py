"""The pair under examination: two networks, how they are called, their loss and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.calling import Call, whole
from driftlab.fold import Fold
from driftlab.modules import paired_modules
from driftlab.probes.arithmetic import Recorded, whole_network
from driftlab.probes.locating import Local
from driftlab.probes.recording import record


@dataclass
class Subject:
    """Reference and candidate, in float32, from the same start.

    Attributes:
        optimizer, candidate_optimizer: make the optimizer of a module.
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

    def __post_init__(self) -> None:
        self.pairs = paired_modules(self.reference, self.candidate, self.fold.sources)

    def on(self, batch: tuple[object, object]) -> Recorded:
        """The whole network on one batch."""
        return whole_network(self.call, self.loss, *batch)

    def local(self, batch: tuple[object, object]) -> Local:
        """Every pair of modules, with what the reference's module is given on this batch."""
        calls = record(self.reference, self.on(batch), self.seed)
        return Local(self.reference, self.candidate, self.fold, self.pairs, calls, self.seed)
