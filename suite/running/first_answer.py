"""What the probes of the first seed say, before anything is trained: on the terminal, and on the page."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.rules import judge
from driftlab.words import Finding, Judgement, Status, Verdict, settled_by, standing
from suite.reading.judging import Judged, write_page
from suite.running.run_record import Began, seed_record

if TYPE_CHECKING:
    from suite.running.experiment_folder import Experiment

_ROUNDING = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def say_first_answer(
    experiment: Experiment, seed: int, findings: list[Finding], began: Began, of: str = ""
) -> None:
    """One line; and ``report.html``, where no verdict stands there yet. ``of``: as in ``seed_done``."""
    if not findings:  # there is no candidate
        return
    answer = _answer(seed, findings)
    answer = replace(answer, headline=answer.headline.removesuffix(" (1 seed)"))
    found = f"{answer.verdict}, {answer.headline}" if settled_by(findings) else answer.headline
    named = f"{of}, seed {seed}" if of else f"seed {seed}"
    experiment.terminal.say(f"{named}, by the probes alone: {found}")
    if os.path.lexists(experiment.folder / "verdict.json"):
        return
    run = seed_record(experiment, seed, began) | {"outcome": "not trained yet"}
    said = f"by the probes of seed {seed} alone, before any update: {answer.headline}"
    shown = replace(answer, headline=said)
    record = SeedRecord(seed, [], [], run | {"probes": [f.as_dict() for f in findings]})
    write_page(Judged(experiment.folder, experiment.settings, experiment.digest, [record], shown, None, True))


def _answer(seed: int, findings: list[Finding]) -> Judgement:
    """Of probes that settle nothing: that they found rounding at most, and what is still open."""
    record = SeedRecord(seed, [], [], {"arms": {}}, findings=findings)
    if settled_by(findings):
        return judge([record])
    asked = [f.evidence for f in findings]
    beyond = [f for f in standing(findings) if f.evidence.supports not in (None, *_ROUNDING)]
    unasked = [e.probe for e in asked if e.status in (Status.REFUSED, Status.FAILED)]
    said = [f"{f.evidence.probe}: {f.evidence.reading}" for f in beyond] or ["nothing beyond rounding so far"]
    said += [f"{', '.join(unasked)} could not be asked"] if unasked else []
    return Judgement(Verdict.INCONCLUSIVE, "; ".join([*said, "the training decides"]), asked)
