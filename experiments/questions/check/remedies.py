"""The table of what can be done about differences in float32, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.check.measures import AS_IT_IS, AVERAGED
from experiments.questions.check.series import Values


def remedy_table(values: Values) -> Table:
    found: dict[str, list[dict]] = {}
    for row in chain.from_iterable(v["remedies"] for v in values.values()):
        found.setdefault(row["what"], []).append(row)
    rows = [
        {
            "what": what,
            "dtype": same[0]["dtype"],
            "eps": median(r["eps"] for r in same),
            "error": 100 * median(errors) if (errors := _known(same)) else None,
        }
        for what, same in found.items()
    ]
    columns = {
        "what": "what is done",
        "dtype": "dtype",
        "eps": "eps",
        "error": "error (% of the derivative, median over points and seeds)",
    }
    return Table("remedies", "What helps", columns, rows, _remedy_words(rows))


def _known(rows: Sequence[dict]) -> list[float]:
    """The errors that there are: a step may leave the domain of the loss."""
    return [r["error"] for r in rows if r["error"] is not None]


def _remedy_words(rows: Sequence[dict]) -> str:
    known = [r for r in rows if r["error"] is not None]
    by_name = {r["what"]: r["error"] for r in known}
    best = min((r for r in known if r["dtype"] == "float32"), key=lambda r: r["error"], default=None)
    words = []
    if {AS_IT_IS, AVERAGED} <= set(by_name):
        plain, mean = by_name[AS_IT_IS], by_name[AVERAGED]
        helps = "helps here" if mean < plain / 4 else "changes nothing that matters"
        reason = ": the loss and its move shrink alike, and float32 keeps a share, not an amount"
        words.append(
            f"Averaging the loss {helps} ({plain:.3g} % off before, {mean:.3g} % after)"
            f"{reason if mean >= plain / 4 else ''}."
        )
    if best is not None:
        words.append(
            f"With no more than float32 in the network the best is: {best['what']} ({best['error']:.2g} %)."
        )
    return " ".join(words) or "Every step leaves the domain of the loss: take a smaller eps."
