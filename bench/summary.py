"""What the bench found, as tables: for the screen and for the published folder."""

from __future__ import annotations

import csv
import io
import platform
from ast import literal_eval
from collections.abc import Sequence
from statistics import median

import torch

from bench.rates import FIRST, TODAY, Rate
from bench.run import Outcome, confusion
from driftlab.glossary import PUBLISHED_NOTE
from driftlab.words import ToldBy, Verdict

VERDICTS = [str(v) for v in Verdict]
ALL = "all cases"
SETS = {"development": False, "held out": True}
# Of cases that were written at different times, each judged by the rules of its time: as tasks are called.
WRITTEN = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth"),
    *("fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth"),
    *("twenty_first", "twenty_second", "twenty_third", "twenty_fourth", "twenty_fifth", "twenty_sixth"),
    *("twenty_seventh", "twenty_eighth", "twenty_ninth", "thirtieth", "thirty_first", "thirty_second"),
    *("thirty_third", "thirty_fourth", "thirty_fifth", "thirty_sixth", "thirty_seventh", "thirty_eighth"),
    *("thirty_ninth", "fortieth", "forty_first", "forty_second", "forty_third", "forty_fourth"),
    *("forty_fifth", "forty_sixth", "forty_seventh", "forty_eighth", "forty_ninth", "fiftieth"),
    *("fifty_first", "fifty_second", "fifty_third"),
)


def as_markdown(outcomes: Sequence[Outcome], command: str, room: str, first: Sequence[Outcome] = ()) -> str:
    """One page: the question, the answer, the confusion matrix, what was wrong, how it was made.

    Args:
        room: the package that the cases are in.
        first: what the held-out cases gave when they were judged for the first time.
    """
    parts = [
        "# How often the diagnosis is right",
        PUBLISHED_NOTE,
        *head(rates(outcomes), rates(first, FIRST), room),
        "## Today",
        _table(HEADER, table_rows(rates(outcomes))),
        *_first_sight(first),
        *_told(rates(outcomes), rates(first, FIRST)),
        "## Confusion matrix",
        "Rows: the true label. Columns: the verdict. A case with several right verdicts counts under its "
        "first label where one of them came out.",
        _matrix(outcomes),
        "## Wrong, or in the wrong place",
        _wrong(outcomes),
        "## How it was made",
        f"`{command}`; {_seconds(outcomes)}; torch {torch.__version__}, Python {platform.python_version()}, "
        "CPU. All cases one by one: [cases.csv](cases.csv).",
    ]
    return "\n\n".join(parts) + "\n"


def head(today: Sequence[Rate], first: Sequence[Rate], room: str) -> list[str]:
    """What was asked, what was found, how sure it is; of the rates those over all cases."""
    asked = (
        "**Asked.** How often does `driftlab.diagnose`, with its defaults and on one thread, say what is "
        "known of a pair of networks? The verdict that is right, and the place, are part of each case "
        f"(`{room.replace('.', '/')}/`)."
    )
    found = [f"- Today: {_said(today)}."]
    if first:
        found.insert(0, f"- At first sight, which is the estimate for a new case: {_said(first)}.")
        found.append("- In between, the rules were mended where they were wrong in kind.")
    sure = (
        "**How sure.** In brackets: Clopper and Pearson's interval of 95 %. Cases share networks, so "
        "intervals are nominal. People of this project wrote the cases: they are no sample of anybody's "
        "code. All rates as numbers: [rates.csv](rates.csv)."
    )
    return [asked, "**Found.**", "\n".join(found), sure]


def _said(rates: Sequence[Rate]) -> str:
    return ", ".join(f"{r.measure} {r}" for r in rates if r.cases == ALL and r.measure in HEADER)


def _first_sight(first: Sequence[Outcome]) -> list[str]:
    """How the rules did on cases that those who made them had not seen: what carries over to others."""
    if not first:
        return []
    return [
        "## At first sight",
        "The held-out cases were written after the rules, apart from them and against them. This is what "
        "they gave when they were judged for the first time ([held_out_first.csv](held_out_first.csv)); the "
        "rules were then mended where they were wrong in kind, so that the table above is no estimate for "
        "new cases, and this one is.",
        _table(HEADER, table_rows(rates(first, FIRST))),
    ]


def rates(outcomes: Sequence[Outcome], when: str = TODAY) -> list[Rate]:
    """Of each set right verdicts and places, false alarms, missed bugs; of all, places by what told them."""
    found = []
    for name, chosen in _sets(outcomes).items():
        harmless = [o for o in chosen if o.label in ("round_off", "bit_identical")]
        counted = {
            "right verdict": [o.right for o in chosen],
            "right place": [o.placed for o in chosen if o.placed is not None],
            "false alarms": [o.verdict == "bug" and not o.right for o in harmless],
            "missed bugs": [not o.right for o in chosen if o.label == "bug"],
        }
        found += [Rate(when, name, "driftlab", m, sum(said), len(said)) for m, said in counted.items()]
    return found + [told for kind in ToldBy if (told := _told_by(kind, outcomes, when)).n]


def _told_by(kind: ToldBy, outcomes: Sequence[Outcome], when: str) -> Rate:
    chosen = [o for o in outcomes if o.placed is not None and (o.where or {}).get("told_by") == kind]
    return Rate(when, ALL, "driftlab", f"{TOLD}{kind}", sum(o.placed for o in chosen), len(chosen))


def _told(*both: Sequence[Rate]) -> list[str]:
    """How far a place may be trusted."""
    today, first = ({r.measure: r for r in rates if r.measure.startswith(TOLD)} for rates in both)
    if not today:
        return []
    rows = [(m.removeprefix(TOLD), str(today[m]), str(first.get(m, ""))) for m in today]
    return [
        "## What tells the place",
        "Each place comes with what told it (`where.told_by`). Left out are cases that were judged before "
        "that was kept, and those where none of these told it.",
        _table(("told by", "right place today", "at first sight"), rows),
    ]


def _sets(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """All of them, and the parts of them that are not all."""
    parts = {name: [o for o in outcomes if o.held_out is held] for name, held in SETS.items()}
    parts |= {
        f"{word.replace('_', '-')} set": [o for o in outcomes if o.task.startswith(f"{word}_")]
        for word in WRITTEN
    }
    parts = {name: chosen for name, chosen in parts.items() if 0 < len(chosen) < len(outcomes)}
    return {ALL: [*outcomes]} | parts if outcomes else {}


HEADER = ("cases", "right verdict", "right place", "false alarms", "missed bugs")
TOLD = "right place, told by "


def table_rows(rates: Sequence[Rate]) -> list[tuple[str, ...]]:
    """A row a set, under ``HEADER``."""
    counted = [r for r in rates if r.measure in HEADER]
    names = dict.fromkeys(r.cases for r in counted)
    return [(name, *(str(r) for r in counted if r.cases == name)) for name in names]


def _matrix(outcomes: Sequence[Outcome]) -> str:
    table = confusion(list(outcomes))
    columns = [v for v in [*VERDICTS, "raised"] if any(row[v] for row in table.values())]
    rows = [
        (label, *(str(row[c] or "") for c in columns), str(sum(row.values()))) for label, row in table.items()
    ]
    return _table(("label", *columns, "n"), rows)


def _wrong(outcomes: Sequence[Outcome]) -> str:
    wrong = [o for o in outcomes if not o.right or o.placed is False]
    if not wrong:
        return "None."
    places = ["" if o.placed is not False else f"place: {o.where}" for o in wrong]
    rows = [
        (o.name, o.task, o.label, o.verdict, place, quoted(o.headline))
        for o, place in zip(wrong, places, strict=True)
    ]
    return _table(("case", "network", "label", "verdict", "", "headline"), rows)


def _seconds(outcomes: Sequence[Outcome]) -> str:
    seconds = [o.seconds for o in outcomes]
    return f"n = {len(seconds)}, {median(seconds):.1f} s a case (median), {max(seconds):.1f} s at most"


def quoted(headline: str) -> str:
    """Its beginning; brackets, as in ``outputs[1][0]``, begin no link."""
    return headline[:160].replace("[", "\\[")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(outcomes[0].as_dict()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(o.as_dict() for o in sorted(outcomes, key=lambda o: (o.held_out, o.name)))
    return text.getvalue()


def read_csv(text: str) -> list[Outcome]:
    """What ``as_csv`` wrote."""
    flags, words = ("right", "placed", "held_out"), {"True": True, "False": False, "": None}
    rows = csv.DictReader(io.StringIO(text))
    return [
        Outcome(
            **row
            | {k: words[row[k]] for k in flags}
            | {"seconds": float(row["seconds"]), "where": literal_eval(row["where"] or "None")}
        )
        for row in rows
    ]
