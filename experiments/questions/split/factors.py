"""The table about the sweep: which sizes, numbers and layouts make the difference larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.split.passes import PASSES
from experiments.questions.split.seeds import Values

Rows = Sequence[Mapping]


def sweep_rows(values: Values) -> list[dict]:
    """Of all seeds, each with its seed."""
    return [row | {"seed": seed} for seed, v in values.items() for row in v["sweep"]]


def bound_in_words(rows: Rows) -> str:
    """How many comparisons lie above the bound and how many are equal, in a sentence or two."""
    above, equal = sum(r["share"] > 1 for r in rows), sum(r["largest"] == 0 for r in rows)
    worst = max(r["share"] for r in rows)
    said = (
        f"{above} of {len(rows):,} comparisons lie above the bound (largest share {worst:.2g}); {equal:,} "
        "are equal bit for bit."
    )
    if above:
        said += " No plain sum in this dtype lies above: look for Winograd, FFT or TF32."
    return said


def factors(values: Values) -> Table:
    columns = {"factor": "factor", "value": "value", "n": "comparisons a pass (n)"}
    for pass_ in PASSES:
        columns[f"equal {pass_}"] = f"{pass_}: bit-equal (count)"
        columns[f"largest {pass_}"] = f"{pass_}: largest difference, median (u·|W|*|x|)"
    rows = sweep_rows(values)
    named = _by_factor([r for r in rows if r["dtype"] == "float32"])
    named |= {("dtype", d): [r for r in rows if r["dtype"] == d] for d in ("float32", "float64")}
    table = [{"factor": f, "value": v} | _summary(chosen) for (f, v), chosen in named.items()]
    said = (
        f"{_what_matters(table)} {bound_in_words(rows)} float32 but for the line float64. u: unit round-off "
        "of the dtype; |W|*|x|: the element's sum over magnitudes. A median of 0: equal in half or more."
    )
    return Table("split_sweep", "What the difference depends on, one factor at a time", columns, table, said)


def _by_factor(rows: Rows) -> dict[tuple[str, str], list]:
    named: dict[tuple[str, str], list] = {}
    for factor in dict.fromkeys(f for r in rows for f in r["factors"]):
        chosen = [r for r in rows if factor in r["factors"]]
        values = dict.fromkeys(r["factors"][factor] for r in chosen)
        for value in sorted(values, key=lambda v: int(v) if v.isdigit() else 0):
            named[factor, value] = [r for r in chosen if r["factors"][factor] == value]
    for key in ("layout", "data"):
        for value in dict.fromkeys(r[key] for r in rows):
            named[key, value] = [r for r in rows if r[key] == value]
    return named


def _summary(rows: Rows) -> dict:
    found: dict = {"n": len(rows) // len(PASSES)}
    for pass_ in PASSES:
        chosen = [r["largest"] for r in rows if r["pass"] == pass_]
        found[f"equal {pass_}"] = f"{chosen.count(0)} of {len(chosen)}"
        found[f"largest {pass_}"] = median(chosen)
    return found


def _what_matters(table: Rows) -> str:
    """The factors in the order of how much they change the input gradient's difference."""
    spans = {}
    for factor in dict.fromkeys(row["factor"] for row in table):
        seen = [row["largest input gradient"] for row in table if row["factor"] == factor]
        if len(seen) > 1 and min(seen) > 0:
            spans[factor] = max(seen) / min(seen)
    if not spans:
        return "The input gradient's difference is 0 for some value of every factor: no ratio to compare."
    ordered = sorted(spans.items(), key=lambda item: -item[1])
    said = ", ".join(f"{factor} {span:.1f}" for factor, span in ordered)
    return (
        f"What changes the input gradient's difference most (greatest over least median in a factor): {said}."
    )
