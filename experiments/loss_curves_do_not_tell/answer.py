"""The answer: which signs tell right from wrong networks, and how often the rules that use them are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from omegaconf import DictConfig

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer, Table
from driftlab.verdict.rules import judge
from driftlab.words import Judgement
from experiments.loss_curves_do_not_tell import series
from experiments.loss_curves_do_not_tell.figures import figures
from experiments.loss_curves_do_not_tell.networks import RIGHT, Network
from experiments.loss_curves_do_not_tell.rules import DRIFTLAB, FEWER_AND_MORE, HABITS, Score, score
from suite.showing.wording import Column, Values, seeds, sentences, table, two_digits

_PERCENT = {"loss": "final training loss off (%)", "accuracy": "test accuracy off (points)"}


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """By the usual rules, with a headline that says whom it is about."""
    judgement = judge(records)
    return replace(judgement, headline=f"of the right rewrite: {judgement.headline}")


def answer(settings: DictConfig, values: Values) -> Answer:
    """Of ``measure``'s values by seed."""
    scores = sorted((score(values, rule) for rule in (*HABITS, DRIFTLAB)), key=lambda s: s.right)
    signs = {sign.key: series.overlap(values, sign) for sign in series.SIGNS}
    sentence = sentences(
        _loss_words(signs["loss"], signs["accuracy"]), _drift_words(signs), _rule_words(scores)
    )
    tables = [_network_table(settings, values), _rule_table(settings, values, scores), _seed_table(values)]
    return Answer(sentence, tables, figures(values))


def _loss_words(loss: series.Overlap, accuracy: series.Overlap) -> str:
    """Whether what everybody looks at tells a wrong network."""
    as_near = "as near to the reference's as those of right ones get"
    if not loss.hidden and not accuracy.hidden:
        return f"They do here: none of {loss.n} wrong networks has a final loss or a test accuracy {as_near}."
    return (
        f"No: of {loss.n} wrong networks {loss.hidden} have a final training loss, and {accuracy.hidden} a "
        f"test accuracy, {as_near}."
    )


def _drift_words(signs: dict[str, series.Overlap]) -> str:
    """Early and late, in both dtypes: kinks carry even float64 away in the end."""
    early, late = signs["float64_first"], signs["float64"]
    narrow = f"{_hide(signs['float32_first'])} after one update and {_count(signs['float32'])} at the end"
    if early.hidden:
        wide = f"{_count(early)} after one update and {_count(late)} at the end"
        return f"Nor does drift always: by float32 drift {narrow}, by float64 drift {wide}."
    if late.hidden:
        said = f"Early float64 drift does: after one update none hides{_apart(early)}"
        said += f"; at the end {_hide(late)}"
    else:
        said = f"Float64 drift does: none hides, neither after one update nor at the end{_apart(late)}"
    return f"{said}. By float32 drift {narrow}."


def _apart(found: series.Overlap) -> str:
    if found.apart is None:
        return ""
    return f", the nearest being {found.apart:.0e} times as far off as any right one"


def _count(found: series.Overlap) -> str:
    return str(found.hidden or "none")


def _hide(found: series.Overlap) -> str:
    return f"{_count(found)} of {found.n} {'hide' if found.hidden > 1 else 'hides'}"


def _rule_words(scores: Sequence[Score]) -> str:
    own = next(s for s in scores if s.rule is DRIFTLAB)
    best = max((s for s in scores if s.rule is not DRIFTLAB), key=lambda s: s.right)
    said = f"driftlab's verdict is right about {own.right} of {own.n} networks"
    habit = f"'{best.rule.words}'"
    if own.right > best.right:
        return f"{said}; the best rule of thumb, {habit}, about {best.right}."
    if own.right == best.right:
        return f"{said}, and so is {habit}."
    return f"{said}, fewer than {habit}: {best.right}."


def _network_table(settings: DictConfig, values: Values) -> Table:
    right = f": {settings.rewrite.target.rpartition('.')[2]}"
    columns = [
        Column("network", "network", lambda n: n.words + right if n.role == RIGHT else n.words),
        Column("same", "same function", lambda n: n.same),
        Column(
            "size", "gradient distance at step 0, float64", lambda n: two_digits(series.size(values, n.role))
        ),
        *(Column(sign.key, _heading(sign), partial(_cell, values, sign)) for sign in series.SIGNS),
    ]
    conclusion = (
        f"Median (least to greatest) of n = {seeds(values)}, beside the reference. "
        "Drift: weight distance (relative), its median after one update. "
        f"The end: {settings.steps} float32, {settings.float64_steps} float64 steps."
    )
    title = "The networks, the smallest fault first"
    return table("networks", title, series.by_size(values), columns, conclusion)


def _heading(sign: series.Sign) -> str:
    return _PERCENT.get(sign.key, sign.words)


def _cell(values: Values, sign: series.Sign, network: Network) -> str:
    """Median and range, the one number where there is one; and in how many seeds there was none."""
    found = series.over_seeds(values, sign.of, network.role)
    write = _percent if sign.key in _PERCENT else two_digits
    if not found:
        return "blew up"
    middle, low, high = (write(f(found)) for f in (median, min, max))
    if sign.key.endswith("_first"):
        return middle
    said = middle if len(found) == 1 else f"{middle} ({low} to {high})"
    return said if len(found) == len(values) else f"{said}; {len(values) - len(found)} blew up"


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}"  # so that -0 reads 0


def _seed_table(values: Values) -> Table:
    """All digits of what the table of networks sums up."""
    columns = {"network": "network", "seed": "seed", "verdict": "driftlab's verdict"}
    columns |= {sign.key: _heading(sign) for sign in series.SIGNS}
    rows = [
        {"network": n.role, "seed": number, "verdict": seed["verdicts"][n.role]["verdict"]}
        | {sign.key: _number(sign, seed, n.role) for sign in series.SIGNS}
        for n in series.by_size(values)
        for number, seed in values.items()
    ]
    return Table("seeds", "Every network and seed", columns, rows, "What the first table sums up.")


def _number(sign: series.Sign, seed: series.Seed, role: str) -> float | None:
    value = sign.of(seed, role)
    return 100 * value if value is not None and sign.key in _PERCENT else value


def _rule_table(settings: DictConfig, values: Values, scores: Sequence[Score]) -> Table:
    columns = [
        Column("rule", "rule", lambda s: s.rule.words),
        Column("right", "right (%)", lambda s: f"{100 * s.right / s.n:.0f}"),
        Column("counts", "right", lambda s: f"{s.right} of {s.n}"),
        Column("interval", "95 % interval (%)", lambda s: " to ".join(f"{100 * v:.0f}" for v in s.interval)),
        Column("alarms", "right networks not cleared", lambda s: f"{s.alarms} of {s.same}"),
        Column("missed", "bugs not caught", lambda s: f"{s.missed} of {s.wrong}"),
    ]
    others = [score(values, rule) for rule in FEWER_AND_MORE]
    instead = ", ".join(f"{s.rule.words} it would be right about {s.right}" for s in others)
    conclusion = (
        f"{scores[0].same} right and {scores[0].wrong} wrong networks, one of each a seed. Those of one "
        "seed share their reference, so the intervals (Clopper and Pearson) are nominal. The rerun takes "
        f"{settings.float64_steps} steps; {instead}. All bugs here are in float64 too: one of float32 code "
        "alone would escape a rerun in float64."
    )
    return table("rules", "How often each rule is right", scores, columns, conclusion)
