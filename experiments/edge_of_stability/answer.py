"""The answer: where the edge is, who is told from the reference, and what one seed alone shows."""

from __future__ import annotations

from omegaconf import DictConfig

from driftlab.report.sections import Answer, Table
from driftlab.verdict.outcomes import SIGNIFICANT
from driftlab.verdict.statistics import clopper_pearson
from experiments.edge_of_stability import outcomes as over
from experiments.edge_of_stability.figures import figure
from suite.showing.wording import Column, Values, listed, seeds, sentences, share_of, table


def answer(settings: DictConfig, values: Values) -> Answer:
    """Everything that the seeds show; at least one."""
    targets = {"candidate": settings.rewrite.target, "bug": settings.bug.target}
    made = {arm: target.rpartition(".")[2] for arm, target in targets.items()}
    said = (_edge(values), _candidate(values, made["candidate"]), _bug(values, made["bug"]), _probes(values))
    return Answer(sentences(*said), [_rates_table(values), _arms_table(values, made)], [figure(values)])


def _p_value(p: float) -> str:
    return "p = 1" if p > 0.995 else f"p = {p:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _interval(pairs: over.Pairs) -> str:
    """The 95 % interval of the share of seeds in which the two ended differently."""
    return " to ".join(map(_percent, clopper_pearson(pairs.differing, pairs.n)))


def _edge(values: Values) -> str:
    rates = [f"{rate:g}" for rate in over.edge(values)]
    if not rates:
        return f"No edge was met: at every learning rate reference and control end alike ({seeds(values)})."
    differ = sum(over.differing(v["runs"], "control") > 0 for v in values.values())
    return (
        f"Training is unstable at learning rate{'s' * (len(rates) > 1)} {listed(rates)}: there reference "
        f"and control, which differ by one ulp in one weight, end differently in {differ} of {seeds(values)}."
    )


def _candidate(values: Values, name: str) -> str:
    p, rate = over.told(values)["candidate"], over.middle(values)
    pairs, control = (over.paired(values, arm, rate) for arm in ("candidate", "control"))
    told = "diverges unlike" if over.is_told(p) else "is not told from"
    return (
        f"Over all rates the candidate ({name}) {told} the reference ({_p_value(p)}). One seed alone, at "
        f"{rate:g}, shows a difference between the two in {pairs.differing} of {pairs.n} cases "
        f"({_percent(pairs.differing / pairs.n)}, 95 % interval {_interval(pairs)}), and between reference "
        f"and control in {control.differing}."
    )


def _bug(values: Values, name: str) -> str:
    p, rates = over.told(values)["bug"], over.rates(values)
    clearest = min(rates, key=lambda rate: over.paired(values, "bug", rate).p)
    pairs = over.paired(values, "bug", clearest)
    said = (
        f"The bug ({name}) is told ({_p_value(p)}): at {clearest:g} it diverges in {pairs.fallen} of "
        f"{pairs.n}, the reference in {pairs.reference_fallen}"
        if over.is_told(p)
        else f"The bug ({name}) is not told by its outcomes ({_p_value(p)}, {seeds(values)})"
    )
    mine, theirs = (over.at_end(values, arm, rates[0], over.final_loss) for arm in ("bug", over.REFERENCE))
    if mine is None or theirs is None:
        return f"{said}."
    return f"{said}; at {rates[0]:g} it ends with a loss of {mine:.2f}, the reference with {theirs:.2f}."


def _probes(values: Values) -> str:
    bug, candidate = (over.accused(values, arm) for arm in ("bug", "candidate"))
    return (
        f"Probes, before any training, call the bug a bug in {bug} of {seeds(values)}, the candidate in "
        f"{candidate}."
    )


def _rates_table(values: Values) -> Table:
    """Counts of seeds, a row a learning rate."""
    n, p, rates = len(values), over.told_by_rate(values), over.rates(values)

    def fallen(arm: str) -> Column:
        heading = f"{arm} diverged (of {n})"
        return Column(arm, heading, lambda rate: over.paired(values, arm, rate).fallen)

    def alone(arm: str) -> Column:
        def cell(rate: float) -> str:
            pairs = over.paired(values, arm, rate)
            return f"{pairs.only_reference} / {pairs.only_arm} ({_p_value(p[arm, rate])})"

        return Column(f"{arm}_pairs", f"only reference / only {arm} diverged", cell)

    columns = [
        Column("rate", "learning rate", lambda rate: f"{rate:g}"),
        Column(
            "learned", f"reference learned (of {n})", lambda rate: over.learned(values, over.REFERENCE, rate)
        ),
        *map(fallen, over.ARMS),
        *map(alone, over.COMPARED),
    ]
    told = {arm: [f"{r:g}" for r in rates if over.is_told(p[arm, r])] for arm in over.COMPARED}
    where = ", ".join(f"{arm} at {listed(found)}" for arm, found in told.items() if found)
    said = (
        "Diverged: NaN or inf, or a final loss above twice the first; learned: one below the first. "
        f"p: McNemar's exact test on the seeds, corrected for all {len(p)} (Holm). p below {SIGNIFICANT:g}: "
        f"{where or 'nowhere'}."
    )
    conclusion = sentences(said, _not_learned(values))
    return table("edge_by_rate", "Which runs diverged, by learning rate", rates, columns, conclusion)


def _not_learned(values: Values) -> str:
    """Where the edge lies above the rates that a training can use, that has to be said."""
    rate = over.middle(values)
    pairs, learned = over.paired(values, "control", rate), over.learned(values, over.REFERENCE, rate)
    stayed = pairs.n - pairs.reference_fallen
    if learned >= stayed:
        return ""
    return f"Of the reference's {stayed} runs at {rate:g} that did not diverge, {learned} learned."


def _arms_table(values: Values, made: dict[str, str]) -> Table:
    """Over all rates, a row an arm."""
    rates, middle, p = over.rates(values), over.middle(values), over.told(values)

    def ran(arm: str) -> list[dict]:
        return [run for rate in rates for run in over.runs(values, arm, rate).values()]

    def beside(key: str, heading: str, of) -> Column:
        return Column(key, heading, lambda arm: None if arm == over.REFERENCE else of(arm))

    def sides(arm: str) -> str:
        net = over.net(values, arm)
        return f"{sum(s > 0 for s in net)} / {sum(s < 0 for s in net)}"

    def differing(arm: str) -> str:
        pairs = over.paired(values, arm, middle)
        return f"{pairs.differing} of {pairs.n} ({_interval(pairs)})"

    def end(key: str, words: str, of) -> Column:
        heading = f"{words} at {rates[0]:g} (median)"
        return Column(key, heading, lambda arm: over.at_end(values, arm, rates[0], of))

    columns = [
        Column("arm", "arm", lambda arm: f"{arm} ({made[arm]})" if arm in made else arm),
        end("loss", "final loss", over.final_loss),
        end("accuracy", "test accuracy", lambda run: run["accuracy"]),
        Column("fallen", "diverged (all runs)", lambda arm: share_of(map(over.fell, ran(arm)))),
        beside("sides", "seeds in which it diverged more / less often than the reference", sides),
        beside("p", "p, all rates", lambda arm: p[arm]),
        beside("differing", f"ends unlike the reference at {middle:g} (95 % interval)", differing),
        Column(
            "accused",
            f"called a bug by the probes (of {len(values)})",
            lambda arm: over.accused(values, arm) if arm in made else None,
        ),
    ]
    pairs = over.paired(values, "control", middle)
    said = (
        "A seed's runs at several rates are not independent, so p counts seeds: the signs of their net "
        f"counts are flipped (exact; {seeds(values)}; Holm over three arms). {middle:g} is the rate at which "
        f"the reference diverges nearest to half of the seeds ({pairs.reference_fallen} of {pairs.n})."
    )
    title = "Each arm against the reference, all learning rates"
    return table("edge_by_arm", title, over.ARMS, columns, said)
