"""The tables: outcomes by learning rate, and arm by arm."""

from __future__ import annotations

from omegaconf import DictConfig

from driftlab.outcomes import SIGNIFICANT
from driftlab.report.sections import Table
from driftlab.statistics import clopper_pearson
from experiments.questions.edge import outcomes as over
from experiments.questions.edge.words import listed, names, p_value, percent, seeds


def rates_table(values: over.Values) -> Table:
    """Counts of seeds, a row a learning rate."""
    n = len(values)
    columns = {"rate": "learning rate", "learned": f"reference learned (of {n})"}
    columns |= {arm: f"{arm} fell over (of {n})" for arm in over.ARMS}
    columns |= {f"{arm}_pairs": f"only reference / only {arm} fell over" for arm in over.COMPARED}
    p = over.told_by_rate(values)
    rows = [_rate_row(values, rate, p) for rate in over.rates(values)]
    return Table("edge_by_rate", "Who fell over, by learning rate", columns, rows, _what_is_told(values, p))


def _rate_row(values: over.Values, rate: float, p: dict[tuple[str, float], float]) -> dict:
    pairs = {arm: over.paired(values, arm, rate) for arm in over.COMPARED}
    row = {
        "rate": f"{rate:g}",
        "learned": over.learned(values, over.REFERENCE, rate),
        over.REFERENCE: pairs["control"].reference_fallen,
    }
    for arm, found in pairs.items():
        row[arm] = found.fallen
        row[f"{arm}_pairs"] = f"{found.only_reference} / {found.only_arm} ({p_value(p[arm, rate])})"
    return row


def _what_is_told(values: over.Values, p: dict[tuple[str, float], float]) -> str:
    where = {arm: [r for r in over.rates(values) if over.is_told(p[arm, r])] for arm in over.COMPARED}
    told = [f"{arm} at {listed(found)}" for arm, found in where.items() if found]
    return (
        "Fell over: NaN or inf, or a final loss above twice the first; learned: one below the first. "
        f"p: McNemar's exact test on the seeds, corrected for all {len(p)} (Holm). p below {SIGNIFICANT:g}: "
        f"{', '.join(told) or 'nowhere'}.{_not_learned(values)}"
    )


def _not_learned(values: over.Values) -> str:
    """Where the edge lies above the rates that a training can use, that has to be said."""
    rate = over.middle(values)
    pairs, learned = over.paired(values, "control", rate), over.learned(values, over.REFERENCE, rate)
    stayed = pairs.n - pairs.reference_fallen
    if learned >= stayed:
        return ""
    return f" Of the reference's {stayed} runs at {rate:g} that did not fall over, {learned} learned."


def arms_table(settings: DictConfig, values: over.Values) -> Table:
    """Over all rates, a row an arm."""
    low, middle, n = over.rates(values)[0], over.middle(values), len(values)
    columns = {
        "arm": "arm",
        "loss": f"final loss at {low:g} (median)",
        "accuracy": f"test accuracy at {low:g} (median)",
        "fallen": "fell over (all runs)",
        "sides": "seeds in which it fell over more / less often than the reference",
        "p": "p, all rates",
        "differing": f"ends unlike the reference at {middle:g} (95 % interval)",
        "accused": f"called a bug by the probes (of {n})",
    }
    rows = [_arm_row(settings, values, arm, low, middle) for arm in over.ARMS]
    pairs = over.paired(values, "control", middle)
    said = (
        "A seed's runs at several rates are not independent, so p counts seeds: the signs of their net "
        f"counts are flipped (exact; {seeds(n)}; Holm over three arms). {middle:g} is the rate at which the "
        f"reference falls over nearest to half of the seeds ({pairs.reference_fallen} of {pairs.n})."
    )
    return Table("edge_by_arm", "Each arm against the reference, all learning rates", columns, rows, said)


def _arm_row(settings: DictConfig, values: over.Values, arm: str, low: float, middle: float) -> dict:
    found = [over.fell(run) for rate in over.rates(values) for run in over.runs(values, arm, rate).values()]
    made = names(settings)
    row = {
        "arm": f"{arm} ({made[arm]})" if arm in made else arm,
        "loss": over.final_loss(values, arm, low),
        "accuracy": over.final_accuracy(values, arm, low),
        "fallen": f"{sum(found)} of {len(found)}",
    }
    if arm == over.REFERENCE:
        return row
    sides, pairs = over.sides(values, arm), over.paired(values, arm, middle)
    least, most = clopper_pearson(pairs.differing, pairs.n)
    return row | {
        "sides": f"{sum(s > 0 for s in sides)} / {sum(s < 0 for s in sides)}",
        "p": over.told(values)[arm],
        "differing": f"{pairs.differing} of {pairs.n} ({percent(least)} to {percent(most)})",
        "accused": None if arm == "control" else over.accused(values, arm),
    }
