"""The answer: where the edge is, who is told from the reference, and what one seed alone shows."""

from __future__ import annotations

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from driftlab.statistics import clopper_pearson
from experiments.questions.edge import outcomes as over
from experiments.questions.edge.figures import figure
from experiments.questions.edge.tables import arms_table, rates_table
from experiments.questions.edge.words import listed, names, p_value, percent, seeds


def answer(settings: DictConfig, values: over.Values) -> Answer:
    """Everything that the seeds show; at least one."""
    made = names(settings)
    said = [_edge(values), _candidate(values, made["candidate"]), _bug(values, made["bug"]), _probes(values)]
    return Answer(" ".join(said), [rates_table(values), arms_table(settings, values)], [figure(values)])


def _edge(values: over.Values) -> str:
    rates, n = over.edge(values), len(values)
    if not rates:
        return f"No edge was met: at every learning rate reference and control end alike ({seeds(n)})."
    differ = sum(over.differing(v["runs"], "control") > 0 for v in values.values())
    return (
        f"Training is on an edge at learning rate{'s' * (len(rates) > 1)} {listed(rates)}: there reference "
        f"and control, one ulp apart in one weight, end differently in {differ} of {seeds(n)}."
    )


def _candidate(values: over.Values, name: str) -> str:
    p, rate = over.told(values)["candidate"], over.middle(values)
    pairs, control = (over.paired(values, arm, rate) for arm in ("candidate", "control"))
    low, high = clopper_pearson(pairs.differing, pairs.n)
    told = "falls over unlike" if over.is_told(p) else "is not told from"
    return (
        f"Over all rates the candidate ({name}) {told} the reference ({p_value(p)}). One seed alone, at "
        f"{rate:g}, shows a difference between the two in {pairs.differing} of {pairs.n} cases "
        f"({percent(pairs.differing / pairs.n)}, 95 % interval {percent(low)} to {percent(high)}), and "
        f"between reference and control in {control.differing}."
    )


def _bug(values: over.Values, name: str) -> str:
    p, rates = over.told(values)["bug"], over.rates(values)
    clearest = min((over.paired(values, "bug", rate).p, rate) for rate in rates)[1]
    pairs = over.paired(values, "bug", clearest)
    said = (
        f"The bug ({name}) is told ({p_value(p)}): at {clearest:g} it falls over in {pairs.fallen} of "
        f"{pairs.n}, the reference in {pairs.reference_fallen}"
        if over.is_told(p)
        else f"The bug ({name}) is not told by its outcomes ({p_value(p)}, {seeds(len(values))})"
    )
    mine, theirs = (over.final_loss(values, arm, rates[0]) for arm in ("bug", over.REFERENCE))
    if mine is None or theirs is None:
        return f"{said}."
    return f"{said}; at {rates[0]:g} it ends with a loss of {mine:.2f}, the reference with {theirs:.2f}."


def _probes(values: over.Values) -> str:
    bug, candidate, n = over.accused(values, "bug"), over.accused(values, "candidate"), len(values)
    return (
        f"Probes, before any training, call the bug a bug in {bug} of {seeds(n)}, the candidate in "
        f"{candidate}."
    )
