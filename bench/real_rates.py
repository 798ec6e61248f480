"""What the bench of real bugs counted, out of its published tables, and what its page opens with."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from bench.rates import FIRST, TODAY, Rate
from bench.real_habits import HABITS

GROUPS = {
    "real bug": "published bugs",
    "mended bug": "the same, mended",
    "right pair": "right pairs out of libraries",
}
ALL = "all"
DRIFTLAB, AS_A_HABIT = "driftlab", "driftlab's verdict"
HABIT_WORDS = {rule.words for rule in HABITS}
RIGHT, PLACE = "right verdict", "right place"
_SUFFIX = {FIRST: " at first sight", TODAY: ""}
_COLUMN = {RIGHT: "right", PLACE: "placed"}


def real_rates(cases: str, habits: str) -> list[Rate]:
    """Of ``cases.csv`` and ``habits.csv``: the verdict and the place by group, then the habits over all."""
    rows = list(csv.DictReader(io.StringIO(cases)))
    groups = {name: [r for r in rows if r["group"] == group] for group, name in GROUPS.items()}
    rates = [
        _counted(when, name, measure, chosen)
        for when in (FIRST, TODAY)
        for name, chosen in [*groups.items(), (ALL, rows)]
        for measure in (RIGHT, PLACE)
    ]
    seen = list(csv.DictReader(io.StringIO(habits)))
    rules = {rule.key: rule.words for rule in HABITS} | {"driftlab": AS_A_HABIT}
    return [*(r for r in rates if r.n), *(rate for key in rules for rate in _of_habit(rules[key], key, seen))]


def _counted(when: str, name: str, measure: str, rows: Sequence[Mapping[str, str]]) -> Rate:
    """Of those that say whether; a right pair has no place."""
    said = [row[_COLUMN[measure] + _SUFFIX[when]] for row in rows]
    said = [text for text in said if text in ("True", "False")]
    return Rate(when, name, DRIFTLAB, measure, said.count("True"), len(said))


def _of_habit(words: str, key: str, rows: Sequence[Mapping[str, str]]) -> Iterable[Rate]:
    right = [row[key] for row in rows if row["kind"] == "right"]
    wrong = [row[key] for row in rows if row["kind"] == "wrong"]
    cleared, caught = right.count("same"), wrong.count("other")
    yield Rate(TODAY, ALL, words, "right", cleared + caught, len(rows))
    yield Rate(TODAY, ALL, words, "right pairs not cleared", len(right) - cleared, len(right))
    yield Rate(TODAY, ALL, words, "bugs not caught", len(wrong) - caught, len(wrong))


ASKED = """**Asked.** Does the verdict hold on faults that nobody of this project thought of? Each case is a
small network of ours with a fault that somebody published in an issue or a pull request, beside its mended
form, which is right; and right pairs made of transformers, timm, torchvision, peft and torch (link, versions
and what was wrong: [cases.csv](cases.csv); the code: `bench/real_bugs/`). `driftlab.diagnose` ran with its
defaults, on one thread."""
SURE = """**How sure.** All cases were chosen and written before any was diagnosed, and all are reported. The
networks are thin, the faults are written anew from what the threads say, and the choice was ours: the figures
are an estimate for faults like these, not for all. A mended form and its fault share a network, so that the
interval over all is nominal. In brackets: Clopper and Pearson's interval of 95 %. As numbers:
[rates.csv](rates.csv)."""


def opening(rates: Sequence[Rate]) -> list[str]:
    """What was asked, what was found, how sure it is."""
    verdicts = {(r.when, r.cases, r.measure): r for r in rates if r.by == DRIFTLAB}
    first = [f"{name} {r}" for name in GROUPS.values() if (r := verdicts.get((FIRST, name, RIGHT)))]
    best = max((r for r in rates if r.by in HABIT_WORDS and r.measure == "right"), key=lambda r: r.count)
    found = [
        f"Right verdicts at first sight: {'; '.join(first)}.",
        f"Right places at first sight: {verdicts[FIRST, ALL, PLACE]}.",
        f"Today: {RIGHT} {verdicts[TODAY, ALL, RIGHT]}, {PLACE} {verdicts[TODAY, ALL, PLACE]}.",
        f"The best of today's habits, {best.by}, is right about {best}.",
    ]
    return [ASKED, "**Found.**", "\n".join(f"- {line}" for line in found), SURE]
