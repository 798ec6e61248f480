"""What the bench of real bugs found, as tables for the published folder."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.case import Case
from bench.habits import Rule, Score, score
from bench.real_habits import HABITS, Seen
from bench.real_rates import AS_A_HABIT, GROUPS, opening, real_rates
from bench.run import Outcome
from bench.summary import _table, quoted
from driftlab.glossary import PUBLISHED_NOTE
from driftlab.verdict.statistics import clopper_pearson

CLEARED = {"round_off": True, "bit_identical": True, "bug": False}
DRIFTLAB = Rule("driftlab", AS_A_HABIT, lambda verdict: CLEARED.get(verdict))


@dataclass(frozen=True)
class Judged:
    """A case, what its diagnosis said, what it said at first sight, and what the habits say of it."""

    case: Case
    outcome: Outcome
    seen: Seen
    first: Mapping[str, str]

    @property
    def same(self) -> bool:
        return self.outcome.kind != "real bug"

    @property
    def place(self) -> str:
        where = self.outcome.where or {}
        return f"{where['module'] or 'the network itself'}: {where['pass']}" if where else ""

    def as_row(self) -> dict:
        outcome, source = self.outcome, self.case.source
        expected = (
            f"{' or '.join(m or 'the network itself' for m in self.case.modules)}: "
            if self.case.modules
            else ""
        )
        now = {
            "verdict": outcome.verdict,
            "right": outcome.right,
            "place": self.place,
            "placed": outcome.placed,
        }
        return {
            "case": outcome.name,
            "kind": "right" if self.same else "wrong",
            "group": outcome.kind,
            "source": source.link,
            "versions": source.versions,
            "what was wrong": source.wrong,
            "network": outcome.task,
            "expected verdict": " or ".join(str(label) for label in self.case.labels),
            "expected place": expected + " or ".join(self.case.passes) if expected else "",
            **{f"{key} at first sight": self.first.get(key, value) for key, value in now.items()},
            **now,
            "headline": outcome.headline,
            "seconds": outcome.seconds,
        }


def first_sights(text: str) -> dict[str, dict[str, str]]:
    """What an earlier cases.csv holds of each case at first sight."""
    kept = " at first sight"
    return {
        row["case"]: {k.removesuffix(kept): v for k, v in row.items() if k.endswith(kept)}
        for row in csv.DictReader(io.StringIO(text))
    }


def as_csv(judged: Sequence[Judged]) -> str:
    return _csv([one.as_row() for one in judged])


def habits_csv(judged: Sequence[Judged]) -> str:
    """A row a case: what each habit takes it for."""
    words = {True: "same", False: "other", None: ""}
    return _csv(
        [
            {
                "case": one.outcome.name,
                "kind": "right" if one.same else "wrong",
                **{rule.key: words[rule.same(one.seen)] for rule in HABITS},
                "driftlab": words[DRIFTLAB.same(one.outcome.verdict)],
            }
            for one in judged
        ]
    )


def _csv(rows: Sequence[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(judged: Sequence[Judged], command: str) -> str:
    """One page: what was asked, what was found at first sight and now, what was wrong, what habits say."""
    rates = real_rates(as_csv(judged), habits_csv(judged))
    parts = [*HEAD, *opening(rates), *_found(judged), *_habits(judged), *_made(judged, command)]
    return "\n\n".join(parts) + "\n"


HEAD = ("# Bugs that people made and published", PUBLISHED_NOTE)


def _found(judged: Sequence[Judged]) -> list[str]:
    rows = [
        _group_row(name, [j for j in judged if j.outcome.kind == group]) for group, name in GROUPS.items()
    ]
    rows.append(_group_row("all", judged))
    head = (
        "cases",
        "right at first sight",
        "95 %",
        "right place at first sight",
        "right now",
        "right place now",
    )
    wrong = [j for j in judged if not _first(j, "right") or _first(j, "placed") is False]
    return [
        "## What was found",
        _table(head, rows),
        "95 %: Clopper and Pearson's interval of the verdicts at first sight. The place counts where "
        "the verdict was right: module and pass as the case expects them.",
        "## Wrong at first sight, or in the wrong place",
        _table(
            ("case", "expected", "verdict", "expected place", "place", "now", "headline"),
            [_wrong_row(j) for j in wrong],
        )
        if wrong
        else "None.",
    ]


def _first(one: Judged, key: str) -> bool | None:
    return {"True": True, "False": False, "": None, "None": None}[str(one.as_row()[f"{key} at first sight"])]


def _group_row(name: str, chosen: Sequence[Judged]) -> tuple[str, ...]:
    right = [_first(j, "right") for j in chosen]
    low, high = clopper_pearson(right.count(True), len(right))
    placed = [p for j in chosen if (p := _first(j, "placed")) is not None]
    now = [j.outcome.placed for j in chosen if j.outcome.placed is not None]
    return (
        name,
        _share(right.count(True), len(right)),
        f"{100 * low:.1f} to {100 * high:.1f} %",
        _share(placed.count(True), len(placed)) if placed else "",
        _share(sum(j.outcome.right for j in chosen), len(chosen)),
        _share(now.count(True), len(now)) if now else "",
    )


def _share(count: int, n: int) -> str:
    return f"{count} of {n} ({100 * count / max(n, 1):.1f} %)"


def _wrong_row(one: Judged) -> tuple[str, ...]:
    row = one.as_row()
    now = "right" if one.outcome.right and one.outcome.placed is not False else "as then"
    return (
        row["case"],
        row["expected verdict"],
        row["verdict at first sight"],
        row["expected place"][:120],
        row["place at first sight"],
        now,
        quoted(row["headline"]),
    )


def _habits(judged: Sequence[Judged]) -> list[str]:
    scores = [score(rule, [(j.same, rule.same(j.seen)) for j in judged]) for rule in HABITS]
    scores.append(score(DRIFTLAB, [(j.same, DRIFTLAB.same(j.outcome.verdict)) for j in judged]))
    head = ("rule", "right", "95 %", "right pairs not cleared", "bugs not caught")
    return [
        "## What today's habits say of the same pairs",
        "In training mode, with the same random numbers, weights put side by side by driftlab's fold; "
        "who has none compares less. A rule that cannot be followed (no float64, say) counts as "
        "wrong. All answers: [habits.csv](habits.csv).",
        _table(head, [_score_row(s) for s in scores]),
    ]


def _score_row(found: Score) -> tuple[str, ...]:
    low, high = found.interval
    return (
        found.rule.words,
        _share(found.right, found.n),
        f"{100 * low:.0f} to {100 * high:.0f} %",
        f"{found.alarms} of {found.same}",
        f"{found.missed} of {found.wrong}",
    )


def _made(judged: Sequence[Judged], command: str) -> list[str]:
    seconds = [j.outcome.seconds for j in judged]
    libraries = sorted({j.case.source.versions for j in judged if j.outcome.kind == "right pair"})
    return [
        "## What was written when",
        "What a case expects of the place was written before its diagnosis and not touched after. First "
        "sights are of two days: 46 faults, 45 mended forms and 19 right pairs were judged before compiled "
        "code, outputs and ports had been worked on, the others after. Two of the mended forms that were "
        "called a bug were at fault themselves (on batches of three, for which they were not written), and "
        "were corrected.",
        "## How it was made",
        f"`{command}`; n = {len(judged)}, {median(seconds):.1f} s a case (median), {max(seconds):.1f} s "
        f"at most; {', '.join(libraries)}, Python {platform.python_version()}, CPU.",
    ]
