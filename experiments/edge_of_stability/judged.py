"""The verdict: probes say whether it is the same function, outcomes whether training is unstable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.outcomes import SIGNIFICANT
from driftlab.verdict.rules import judge
from driftlab.verdict.statistics import holm, sign_flip_test
from driftlab.words import Evidence, Finding, Judgement, Status, Verdict
from experiments.edge_of_stability.outcomes import COMPARED, differing, fell, sides
from suite.showing.wording import seeds

EDGE, FALLEN, SIDE = "edge", "fallen", "side_of_{}"
_QUESTIONS = {
    EDGE: "At how many learning rates do reference and control, which differ by one ulp, end differently?",
    FALLEN: "At how many learning rates does the reference or the control diverge?",
} | {
    SIDE.format(arm): f"At how many more learning rates does the {arm} diverge than the reference?"
    for arm in COMPARED
}
_SAME_FUNCTION = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def outcome_findings(runs: Sequence[Mapping]) -> list[Finding]:
    """What ``judged`` has to know of one seed's runs."""
    fallen = {run["rate"] for run in runs if run["arm"] in ("reference", "control") and fell(run)}
    measured = {EDGE: differing(runs, "control"), FALLEN: len(fallen)}
    measured |= {SIDE.format(arm): sum(sides(runs, arm)) for arm in COMPARED}
    of = len({run["rate"] for run in runs})
    return [
        Finding(Evidence(probe, _QUESTIONS[probe], float(number), 0.0, None, f"{number} of {of}"))
        for probe, number in measured.items()
    ]


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """A bug that the probes find -> ``bug``; the same function, and reference or control diverge ->
    ``unstable``, unless the candidate is told from the reference by its outcomes and the control is not."""
    found = [finding for record in records for finding in record.found()]
    probes = [f for f in found if f.evidence.probe not in _QUESTIONS]
    if not records or any(map(_decides_alone, probes)):
        return judge([_without_outcomes(r) for r in records])
    own = {name: [f.evidence for f in found if f.evidence.probe == name] for name in _QUESTIONS}
    outcomes = _over_seeds(own)
    evidence = [*_one_each(probes), *outcomes.values()]
    verdict, headline = _decided(evidence, outcomes)
    if "seed" not in headline:  # else it has been counted already
        headline += f" ({seeds(records)})"
    return Judgement(verdict, headline, evidence)


def _decides_alone(finding: Finding) -> bool:
    """Another function, a network that does not repeat itself, or a probe that failed in our own code."""
    if finding.decides and finding.evidence.status is Status.FAILED:
        return True
    return finding.evidence.supports in (Verdict.BUG, Verdict.NONDETERMINISTIC)


def _without_outcomes(record: SeedRecord) -> SeedRecord:
    return replace(record, findings=[f for f in record.found() if f.evidence.probe not in _QUESTIONS])


def _one_each(probes: Sequence[Finding]) -> list[Evidence]:
    """Of each probe the first seed in which it speaks against the same function, else the first."""
    by_probe: dict[str, list[Evidence]] = {}
    for f in probes:
        by_probe.setdefault(f.evidence.probe, []).append(f.evidence)
    return [
        next((e for e in found if e.supports not in (None, *_SAME_FUNCTION)), found[0])
        for found in by_probe.values()
    ]


def _over_seeds(own: Mapping[str, Sequence[Evidence]]) -> dict[str, Evidence]:
    """Each of the outcomes' evidence of all seeds as one."""
    p = holm({arm: sign_flip_test([int(e.measured) for e in own[SIDE.format(arm)]]) for arm in COMPARED})
    found = {}
    for name in (EDGE, FALLEN):
        seen, n = sum(e.measured > 0 for e in own[name]), len(own[name])
        supports = Verdict.UNSTABLE if seen else None
        reading = f"at one learning rate or more in {seen} of {n} seeds"
        found[name] = Evidence(name, _QUESTIONS[name], float(seen), 0.0, supports, reading)
    for arm in COMPARED:
        name, net = SIDE.format(arm), sum(int(e.measured) for e in own[SIDE.format(arm)])
        reading = f"{net:+d} over all seeds; p = {p[arm]:.2g} (signs of seeds flipped, Holm)"
        found[name] = Evidence(name, _QUESTIONS[name], p[arm], SIGNIFICANT, None, reading)
    return found


def _decided(evidence: Sequence[Evidence], outcomes: Mapping[str, Evidence]) -> tuple[Verdict, str]:
    said = {e.supports for e in evidence}
    if Verdict.REDUCED_PRECISION in said:
        return Verdict.REDUCED_PRECISION, "the same function, computed in fewer bits than float32 promises"
    if not any(e.probe == "function" and e.supports in _SAME_FUNCTION for e in evidence):
        return Verdict.INCONCLUSIVE, "no probe could tell whether the candidate is the same function"
    candidate, control = (outcomes[SIDE.format(arm)].measured for arm in ("candidate", "control"))
    if candidate < SIGNIFICANT <= control:
        return Verdict.INCONCLUSIVE, (
            f"the probes find the same function, yet the candidate diverges unlike the reference "
            f"(p = {candidate:.2g}) and the control does not (p = {control:.2g})"
        )
    if outcomes[EDGE].measured:
        return Verdict.UNSTABLE, (
            "the same function, but the training is unstable: reference and control, which differ by one "
            f"ulp in one weight, end differently {outcomes[EDGE].reading}"
        )
    if outcomes[FALLEN].measured:
        return Verdict.UNSTABLE, (
            "the same function, and the training diverges without it: the reference or the control "
            f"{outcomes[FALLEN].reading}"
        )
    return Verdict.ROUND_OFF, "the same function, and neither reference nor control diverges"
