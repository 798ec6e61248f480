"""What the suite says about a network on a batch against the same network otherwise: rounding, or a leak?"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlab.batch_invariance import batch_invariant
from driftlab.diagnosis import diagnosed
from driftlab.network.calling import calling
from driftlab.network.pair import Pair, the_pair
from driftlab.probes.determinism import PROBE as DETERMINISM
from driftlab.probes.examination import Examination, examine
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.rules import judge
from driftlab.words import settled_by
from experiments.batch_size.arithmetic import computing
from experiments.batch_size.plan import Plan
from models.policy_net import PolicyNet
from models.rewrites.row_by_row import RowByRow, row_by_row


class LessBatchMean(nn.Module):
    """A planted leak: the logits of ``module`` less their mean over the batch, [N, moves]."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        logits = self.module(x)
        return logits - logits.mean(0)


class InLargerBatch(RowByRow):
    """``module`` on the batch with ``more`` of its rows once more at the end, whose answers are dropped."""

    def __init__(self, module: nn.Module, more: int):
        super().__init__(module)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        more = x[torch.arange(self.more, device=x.device) % len(x)]
        return self.module(torch.cat([x, more]))[: len(x)]


EVAL = "eval mode: on a batch against row by row"
TRAIN = "BatchNorm left in train mode: on a batch against row by row"
LEAK = "logits less their batch mean (planted leak): on a batch against row by row"
CHUNKED = "in chunks: on a batch against within a larger batch"


def verdicts(plan: Plan, network: PolicyNet, rows: Tensor, seed: int) -> tuple[SeedRecord, list[dict]]:
    """The record of the pair in question, and what the suite says about it and about the controls."""
    asked, found = _questions(plan, network), []
    subjects = {name: subject_of(plan, *pair, rows, seed) for name, pair in asked.items()}
    batch, steps = batch_of(plan, rows, seed), plan.suite[1]
    own, *controls = asked
    records = {own: diagnosed(subjects[own], [batch], steps)}
    for name in controls:
        subject = subjects[name]
        records[name] = settled(subject, batch) or diagnosed(subject, [batch], steps)
    for name, (reference, _) in asked.items():
        judgement = judge([records[name]])
        decisive = next((e for e in judgement.evidence if e.supports is judgement.verdict), None)
        found.append(
            {
                "compared": name,
                "verdict": str(judgement.verdict),
                "probe": decisive.probe if decisive else None,
                "reading": decisive.reading if decisive else judgement.headline,
                "neighbours": neighbours(plan, reference, rows),
            }
        )
    return records[own], found


def _questions(plan: Plan, network: PolicyNet) -> dict[str, tuple[nn.Module, Callable]]:
    """Reference and rewrite of each pair, the one in question first."""
    if plan.invariant:
        # row by row the answers are the same too, but the gradients of the weights are then sums of rows, not
        # of chunks: another order
        return {
            CHUNKED: (
                batch_invariant(network, plan.chunk),
                lambda model: InLargerBatch(model, plan.chunk + 1),
            )
        }
    return {
        EVAL: (network, row_by_row),
        TRAIN: (copy.deepcopy(network).train(), row_by_row),
        LEAK: (LessBatchMean(network), row_by_row),
    }


def batch_of(plan: Plan, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    count = plan.suite[0]
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(plan.network["moves"], (count,), generator=generator)
    return rows[:count], targets.to(plan.device)


def subject_of(
    plan: Plan, reference: nn.Module, rewrite: Callable[[nn.Module], nn.Module], rows: Tensor, seed: int
) -> Pair:
    mine, theirs, fold = the_pair(reference, rewrite(copy.deepcopy(reference)), None)
    count, _, rate = plan.suite

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)

    call = calling(mine, rows[:count])
    return Pair(mine, theirs, fold, F.cross_entropy, optimizer, optimizer, call, seed)


def settled(subject: Pair, batch: tuple[Tensor, Tensor]) -> SeedRecord | None:
    """The record where the first questions of ``diagnosed`` settle it; the rest would take longer."""
    found = Examination(subject, batch)
    list(examine(found, (DETERMINISM, FUNCTION)))
    if not settled_by(found.findings):
        return None
    return SeedRecord(subject.seed, [], [], {"arms": {}, "probes": [f.as_dict() for f in found.findings]})


def neighbours(plan: Plan, network: nn.Module, rows: Tensor) -> float:
    """How far the first row's logits move where the other rows are replaced, at one batch size (absolute).

    Rounding depends on the shape of a batch, not on what its other rows hold: 0 unless rows interact.
    """
    others = torch.cat([rows[:1], 1 - rows[1 : plan.at]])
    with computing("float32"):  # copies, since a norm in train mode keeps something of what it sees
        before, after = (copy.deepcopy(network)(x)[0] for x in (rows[: plan.at], others))
    return float((after - before).abs().max())
