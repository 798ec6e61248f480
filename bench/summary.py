"""What the bench found, as tables: for the screen and for the published folder."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Sequence
from statistics import median

import torch

from bench.run import Outcome, confusion
from driftlab.glossary import PUBLISHED_NOTE
from driftlab.verdict.statistics import clopper_pearson
from driftlab.words import Verdict

VERDICTS = [str(v) for v in Verdict]
SETS = {"all cases": None, "development": False, "held out": True}


def as_markdown(outcomes: Sequence[Outcome], command: str, room: str, first: Sequence[Outcome] = ()) -> str:
    """One page: the question, the answer, the confusion matrix, what was wrong, how it was made.

    Args:
        room: the package that the cases are in.
        first: what the held-out cases gave when they were judged for the first time.
    """
    parts = [
        "# How often the diagnosis is right",
        PUBLISHED_NOTE,
        *head(rates(outcomes)[0], rates(first)[0] if first else None, room),
        "## Today",
        _table(HEADER, rates(outcomes)),
        *_first_sight(first),
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


def head(today: Sequence[str], first: Sequence[str] | None, room: str) -> list[str]:
    """What was asked, what was found, how sure it is; the two are rows of ``rates``."""
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
        "**How sure.** Intervals are Clopper and Pearson's, of 95 %. Cases share networks, so intervals are "
        "nominal. People of this project wrote the cases: they are no sample of anybody's code."
    )
    return [asked, "**Found.**", "\n".join(found), sure]


def _said(row: Sequence[str]) -> str:
    _, right, place, alarms, missed = row
    return f"right verdict {right}, right place {place}, false alarms {alarms}, missed bugs {missed}"


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
        _table(HEADER, rates(first)),
    ]


def rates(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A row a set: name, right verdicts, right places, false alarms, missed bugs."""
    rows = []
    for name, held_out in SETS.items():
        chosen = [o for o in outcomes if held_out is None or o.held_out is held_out]
        if not chosen or (held_out is not None and len(chosen) == len(outcomes)):
            continue
        placed = [o for o in chosen if o.placed is not None]
        harmless = [o for o in chosen if o.label in ("round_off", "bit_identical")]
        bugs = [o for o in chosen if o.label == "bug"]
        rows.append(
            (
                name,
                share(sum(o.right for o in chosen), len(chosen)),
                share(sum(o.placed for o in placed), len(placed)),
                share(sum(o.verdict == "bug" and not o.right for o in harmless), len(harmless)),
                share(sum(not o.right for o in bugs), len(bugs)),
            )
        )
    return rows


HEADER = ("cases", "right verdict", "right place", "false alarms", "missed bugs")


def share(count: int, n: int) -> str:
    if not n:
        return f"{count} of {n}"
    low, high = clopper_pearson(count, n)
    return f"{count} of {n} ({100 * count / n:.1f} %; {100 * low:.1f} to {100 * high:.1f})"


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
        (o.name, o.task, o.label, o.verdict, place, o.headline[:160])
        for o, place in zip(wrong, places, strict=True)
    ]
    return _table(("case", "network", "label", "verdict", "", "headline"), rows)


def _seconds(outcomes: Sequence[Outcome]) -> str:
    seconds = [o.seconds for o in outcomes]
    return f"n = {len(seconds)}, {median(seconds):.1f} s a case (median), {max(seconds):.1f} s at most"


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
    """What ``as_csv`` wrote; the place is left out."""
    flags, words = ("right", "placed", "held_out"), {"True": True, "False": False, "": None}
    rows = csv.DictReader(io.StringIO(text))
    return [
        Outcome(**row | {k: words[row[k]] for k in flags} | {"seconds": float(row["seconds"]), "where": None})
        for row in rows
    ]
