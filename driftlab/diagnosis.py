"""One call for the whole question: is the candidate the same function, and if not, where not?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.calling import calling
from driftlab.examination import Examination, examined
from driftlab.findings.late import ask_last, ask_later, ask_repeat, ask_since
from driftlab.late import Snapshots
from driftlab.lockstep import cast
from driftlab.pair import DiagnoseError, Rewrite, the_pair
from driftlab.pairs import first_excess
from driftlab.probes.arithmetic import CannotRunError
from driftlab.records import SeedRecord
from driftlab.rules import judge, settled_by
from driftlab.shadow import eager
from driftlab.subject import Subject
from driftlab.verdict import Evidence, Finding, Judgement, Place, Verdict
from driftlab.window import Batches, Window


@dataclass(frozen=True)
class Diagnosis:
    """The verdict about a candidate, with its reasons; ``print`` shows them as a table.

    Attributes:
        verdict: what came out.
        headline: the same in a sentence.
        where: module, pass and step, where the verdict has a place.
        evidence: every question that was asked, with measured value, threshold and reading.
    """

    verdict: Verdict
    headline: str
    where: Place | None
    evidence: list[Evidence]

    def __str__(self) -> str:
        from driftlab.table import as_table

        return as_table(self)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What the networks are trained by where nobody says otherwise."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def diagnose(
    reference: nn.Module,
    candidate: nn.Module | Rewrite,
    batches: Iterable[tuple[object, object]],
    loss: Callable[[object, object], Tensor] = F.cross_entropy,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    candidate_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    steps: int = 20,
    fold: Callable | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Say whether ``candidate`` computes and trains as ``reference`` does, and if not, where it departs.

    Probes come first, which need no training; then, unless they settle it, both are trained in lockstep in
    float32 and float64 beside controls nudged by one ulp. Nothing that is handed over is changed.

    Args:
        reference: the network as it was.
        candidate: the network after the rewrite, from the same weights; or the function that makes it from a
            deep copy of the reference.
        batches: pairs ``(inputs, targets)``, repeated as needed. Inputs are a tensor, or a tuple or dict of
            arguments; they lie on the networks' device.
        loss: ``loss(outputs, targets)``, a scalar tensor.
        optimizer: makes an optimizer of parameters.
        candidate_optimizer: makes the candidate's optimizer of the candidate module, for rewrites that change
            parameter groups; as ``optimizer`` where None.
        steps: updates in the lockstep window. A fault that sets in later is not seen.
        fold: ``fold(tensors by the candidate's names) -> tensors by the reference's names``; found by value
            where None.
        seed: of the random layers and of the controls' nudges.

    Raises:
        DiagnoseError: a network does not run on the batches, an argument is not what it should be.
    """
    subject, kept = _subject(
        reference, candidate, batches, loss, optimizer, candidate_optimizer, steps, fold, seed
    )
    was = torch.get_rng_state()
    try:
        record = diagnosed(subject, kept, steps)
    except CannotRunError as error:
        raise DiagnoseError(f"a network does not run on the first batch: {error}") from None
    except Exception as error:  # whatever a stranger's forward, loss or optimizer raises later on
        message = " ".join(str(error).split())[:200]
        raise DiagnoseError(f"training stops with {type(error).__name__}: {message}") from error
    finally:
        torch.set_rng_state(was)
    judgement = judge([record])
    return _diagnosis(judgement)


def diagnosed(subject: Subject, batches: Batches, steps: int) -> SeedRecord:
    """All the evidence about a pair, as the record of one seed.

    Raises:
        CannotRunError: one of the two does not run at all.
    """
    found = examined(subject, batches[0])
    with eager():
        return _trained(subject, batches, steps, found)


def _trained(subject: Subject, batches: Batches, steps: int, found: Examination) -> SeedRecord:
    """The window, or, where the probes have settled it, the step from which it shows."""
    if settled_by(found.findings):
        verdict, decisive = settled_by(found.findings)
        since = decisive
        if verdict is Verdict.BUG:
            since = ask_since(decisive, subject, batches, steps, found.float64)
        findings = [since if f is decisive else f for f in found.findings]
        return SeedRecord(subject.seed, [], [], {"arms": {}, "probes": _stored(findings)})
    record = Window(subject, batches, steps, float64=found.float64).run()
    second = Window(subject, batches, steps, dtypes=("float32",), controls=())
    snapshots = Snapshots(subject, second)
    findings = [*found.findings, ask_repeat(snapshots, record, second.record())]
    if findings[-1].evidence.supports is None:
        excess = first_excess([record], narrow=found.supports(Verdict.REDUCED_PRECISION))
        findings += ask_later(subject, excess, lambda _: snapshots, lambda: ask_last(snapshots, steps))
    return SeedRecord(
        subject.seed, record.curves, record.evaluations, record.run | {"probes": _stored(findings)}
    )


def _stored(findings: list[Finding]) -> list[dict]:
    return [f.as_dict() for f in findings]


def _diagnosis(judgement: Judgement) -> Diagnosis:
    return Diagnosis(judgement.verdict, judgement.headline, judgement.where, judgement.evidence)


def _subject(reference, candidate, batches, loss, optimizer, candidate_optimizer, steps, fold, seed):
    if not isinstance(steps, int) or steps < 1:
        raise DiagnoseError(
            f"steps={steps!r}: give a whole number of updates, 1 or more (nine or more tell most)"
        )
    mine, theirs, found = the_pair(reference, candidate, fold)
    kept = _batches(batches, steps)
    subject = Subject(
        mine,
        theirs,
        found,
        loss,
        lambda module: optimizer(module.parameters()),
        candidate_optimizer or (lambda module: optimizer(module.parameters())),
        calling(mine, kept[0][0]),
        seed,
    )
    return subject, kept


def _batches(batches: Iterable, steps: int) -> list:
    kept = list(islice(iter(batches), steps + 1))
    if not kept:
        raise DiagnoseError("batches holds none: give an iterable of (inputs, targets)")
    for batch in kept:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            kind = (
                f"{type(batch).__name__} of {len(batch)}"
                if hasattr(batch, "__len__")
                else type(batch).__name__
            )
            raise DiagnoseError(f"batches holds a {kind}: give pairs (inputs, targets)")
    return [tuple(cast(part, torch.float32) for part in batch) for batch in kept]
