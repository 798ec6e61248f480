"""One inquiry, whoever trains: examine -> train -> where the pair leaves its controls -> look again -> end.

``diagnose`` trains a window in memory; an experiment trains a seed that leaves its files and may be resumed.
Both are a ``Training``, and everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from driftlab.blame import is_ours
from driftlab.lockstep.window import Snapshots
from driftlab.network.pair import Pair
from driftlab.probes import every_probe
from driftlab.probes.examination import Examination, examine
from driftlab.probes.excess import PROBE as EXCESS
from driftlab.probes.excess import ask_excess
from driftlab.probes.last_step import PROBE as LAST_STEP
from driftlab.probes.last_step import ask_last_step
from driftlab.probes.probe import Probe
from driftlab.probes.process_settings import ask_trained
from driftlab.probes.stored_otherwise import ask_stored_otherwise
from driftlab.process import TRAINING, noticed
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.envelope import first_excess, honoured
from driftlab.verdict.outcomes import before_it_ran_away
from driftlab.words import Finding, Verdict, settled_by, standing

_BOTH = ("float64", "float32")


@dataclass(frozen=True)
class Examined:
    """What the probes found before any update.

    Attributes:
        float64: whether the candidate's float64 is float64.
        dtypes: in which the reference runs.
    """

    findings: list[Finding]
    float64: bool = True
    dtypes: tuple[str, ...] = _BOTH

    @property
    def narrow(self) -> bool:
        """Whether the candidate computes in fewer bits: its float32 pair then looks like a bug's."""
        return any(f.evidence.supports is Verdict.REDUCED_PRECISION for f in standing(self.findings))


class Training(Protocol):
    """Whoever trains the pair."""

    pair: Pair
    steps: int

    def train(self, found: Examined) -> SeedRecord:
        """All updates that are still to do; curves and evaluations of the whole."""

    def after(self, found: Examined, record: SeedRecord) -> list[Finding]:
        """What this kind of training asks besides, once it is over."""

    def until(self, step: int) -> Snapshots:
        """The float32 pair at every step up to ``step``, or as far as this training can go back."""

    def at_the_end(self) -> Snapshots | None:
        """The float32 pair after the last update; None where one of the two blew up."""


def without_training() -> list[Probe]:
    """The probes that need none, in their order."""
    return [probe for probe in every_probe() if probe.ask is not None]


def before_training(
    pair: Pair, batch: tuple[object, object], probes: Iterable[Probe] | None = None
) -> tuple[Examined, Examination]:
    """Every probe that needs no training, on one batch: what they found, and on what they found it.

    Args:
        probes: these instead; each is taken once the one before it has answered.

    Raises:
        CannotRunError: one of the two does not run on the batch at all.
    """
    found = Examination(pair, batch)
    list(examine(found, without_training() if probes is None else probes))
    return Examined(found.findings, _seen(found, "float64", True), _seen(found, "dtypes", _BOTH)), found


def _seen(found: Examination, what: str, otherwise: Any) -> Any:
    """As the probes saw it; where they failed to, the pair is trained in float64 and the curves tell."""
    try:
        return getattr(found, what)
    except Exception as error:
        if not is_ours(error):
            raise
        return otherwise


def inquire(training: Training, found: Examined) -> tuple[SeedRecord, list[Finding]]:
    """From what the probes found on: the training's curves, and all that was found before and after it."""
    record, findings = _inquired(training, found)
    return record, [finding.naming(training.pair.counterparts) for finding in findings]


def _inquired(training: Training, found: Examined) -> tuple[SeedRecord, list[Finding]]:
    with noticed(TRAINING):
        record = training.train(found)
    if settled_by(found.findings):
        return record, found.findings
    findings = [*found.findings, *ask_trained(), *training.after(found, record)]
    if settled_by(findings):
        return record, findings
    return record, findings + look_again(training, found, record)


def look_again(training: Training, found: Examined, record: SeedRecord) -> list[Finding]:
    """What curves that leave their controls come from; where that is no fault, the end is looked at too."""
    excess = first_excess([honoured(record)], found.narrow)
    pair = training.pair
    if pair.written_otherwise:  # there is no putting both on the same weights
        return ask_stored_otherwise(pair, excess) if excess and excess.step else []
    findings = _guarded(EXCESS, lambda: ask_excess(training.until(excess.step), excess)) if excess else []
    if settled_by(findings):
        return findings
    return findings + _guarded(LAST_STEP, lambda: _at_the_end(training, record))


def _at_the_end(training: Training, record: SeedRecord) -> list[Finding]:
    """Of a training that runs away the last step before it does."""
    last, steps = training.at_the_end(), before_it_ran_away(record, "reference.float32")
    if last is None:
        return [LAST_STEP.not_applicable("the reference or the candidate blew up")]
    if steps == 0:
        return [LAST_STEP.not_applicable("the reference's first update makes it run away")]
    if steps is not None:
        return ask_last_step(training.until(steps), steps)
    return ask_last_step(last, training.steps, lambda: training.until(training.steps))


def _guarded(probe: Probe, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A mistake of our own is said in the probe's place; what the pair's code raises is raised."""
    try:
        return list(ask())
    except Exception as error:
        if not is_ours(error):
            raise
        return [probe.failed(error)]
