"""The table about the sweep: which sizes, numbers and layouts make the difference larger."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from driftlab.report.sections import Table
from experiments.split_gradient.passes import PASSES
from suite.showing.wording import Column, Rows, Values, all_rows, chosen, grouped, numbers, table


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
    rows = all_rows(values, "sweep")
    columns = [
        Column("factor", "factor", lambda line: line[0]),
        Column("value", "value", lambda line: line[1]),
        Column("n", "comparisons a pass (n)", lambda line: len(line[2]) // len(PASSES)),
    ]
    for pass_ in PASSES:
        columns += [
            Column(f"equal {pass_}", f"{pass_}: bit-equal (count)", _of_pass(pass_, _equal)),
            Column(
                f"largest {pass_}",
                f"{pass_}: largest difference, median (u·|W|*|x|)",
                _of_pass(pass_, median),
            ),
        ]

    def said(lines: list[dict]) -> str:
        return (
            f"{_what_matters(lines)} {bound_in_words(rows)} float32 but for the line float64. u: unit "
            "round-off of the dtype; |W|*|x|: the element's sum over magnitudes. A median of 0: equal in "
            "half or more."
        )

    title = "What the difference depends on, one factor at a time"
    return table("split_sweep", title, _by_factor(rows), columns, said)


def _of_pass(pass_: str, take: Callable[[list], object]) -> Callable[[tuple], object]:
    return lambda line: take(numbers(chosen(line[2], pass_=pass_), "largest"))


def _equal(largest: list[float]) -> str:
    return f"{largest.count(0)} of {len(largest)}"


def _by_factor(every: Rows) -> list[tuple[str, str, Rows]]:
    """Factor, its value, and the rows that have it."""
    rows, lines = chosen(every, dtype="float32"), []
    for factor in dict.fromkeys(f for r in rows for f in r["factors"]):
        found = grouped([r["factors"] | {"row": r} for r in rows if factor in r["factors"]], factor)
        for value in sorted(found, key=lambda v: int(v) if v.isdigit() else 0):
            lines.append((factor, value, [one["row"] for one in found[value]]))
    lines += [
        (key, value, found) for key in ("layout", "data") for value, found in grouped(rows, key).items()
    ]
    return lines + [("dtype", dtype, chosen(every, dtype=dtype)) for dtype in ("float32", "float64")]


def _what_matters(lines: Rows) -> str:
    """The factors in the order of how much they change the input gradient's difference."""
    spans = {}
    for factor, found in grouped(lines, "factor").items():
        seen = numbers(found, "largest input gradient")
        if len(seen) > 1 and min(seen) > 0:
            spans[factor] = max(seen) / min(seen)
    if not spans:
        return "The input gradient's difference is 0 for some value of every factor: no ratio to compare."
    ordered = sorted(spans.items(), key=lambda item: -item[1])
    said = ", ".join(f"{factor} {span:.1f}" for factor, span in ordered)
    return (
        f"What changes the input gradient's difference most (greatest over least median in a factor): {said}."
    )
