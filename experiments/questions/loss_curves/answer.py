"""The answer: which signs tell right from wrong networks, and how often the rules that use them are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from driftlab.records import SeedRecord
from driftlab.report.sections import Answer
from driftlab.rules import judge
from driftlab.verdict import Judgement
from experiments.questions.loss_curves.figures import figures
from experiments.questions.loss_curves.rules import DRIFTLAB, HABITS, Score, score
from experiments.questions.loss_curves.series import SIGNS, Overlap, Values, overlap
from experiments.questions.loss_curves.tables import network_table, rule_table, seed_table


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """By the usual rules, with a headline that says whom it is about."""
    judgement = judge(records)
    return replace(judgement, headline=f"of the right rewrite: {judgement.headline}")


def answer(settings: DictConfig, values: Values) -> Answer:
    """Of ``measure``'s values by seed."""
    scores = sorted((score(values, rule) for rule in (*HABITS, DRIFTLAB)), key=lambda s: s.right)
    signs = {sign.key: overlap(values, sign) for sign in SIGNS}
    sentence = f"{_loss_words(signs['loss'], signs['accuracy'])} {_drift_words(signs)} {_rule_words(scores)}"
    tables = [network_table(settings, values), rule_table(settings, values, scores), seed_table(values)]
    return Answer(sentence, tables, figures(values))


def _loss_words(loss: Overlap, accuracy: Overlap) -> str:
    """Whether what everybody looks at tells a wrong network."""
    as_near = "as near to the reference's as those of right ones get"
    if not loss.hidden and not accuracy.hidden:
        return f"They do here: none of {loss.n} wrong networks has a final loss or a test accuracy {as_near}."
    return (
        f"No: of {loss.n} wrong networks {loss.hidden} have a final training loss, and {accuracy.hidden} a "
        f"test accuracy, {as_near}."
    )


def _drift_words(signs: dict[str, Overlap]) -> str:
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


def _apart(found: Overlap) -> str:
    if found.apart is None:
        return ""
    return f", the nearest being {found.apart:.0e} times as far off as any right one"


def _count(found: Overlap) -> str:
    return str(found.hidden or "none")


def _hide(found: Overlap) -> str:
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
