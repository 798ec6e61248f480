"""groups=2 against convs side by side: largest differences, bounds and integers, with their conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlab.arithmetic.integers import EXACT_PASSES
from driftlab.report.sections import Table
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values

# For the forward pass of the thread's conv, of the size that the thread gives it.
THREAD_CASE = "Conv2d(6, 6, 3, padding=1, groups=2, bias=False) on [1, 6, 24, 24]"
THREAD = 3.5763e-07
PREDICTED = {"float32": (2e-7, 4e-7, "2e-7 to 4e-7, or 0"), "float64": (0.0, 1e-15, "0 to 1e-15")}


def literal_table(values: Values) -> Table:
    """The thread's own lines: largest differences over the seeds, by dtype and pass."""
    literals = say.each(values, "literal")
    case = literals[0]["case"]
    columns = (
        say.first("dtype", "dtype"),
        say.first("pass", "pass"),
        Column("smallest", "largest difference, least over seeds (absolute)", say.least("absolute")),
        say.greatest("absolute", "largest difference, greatest over seeds (absolute)"),
        Column("expected", "predicted (absolute)", lambda found: _expected(found, case)),
        say.greatest("relative", "over the tensor's largest entry (relative)"),
        say.greatest("ulps", "in ulps of the entry where it is largest"),
        say.greatest("share", "largest share of its bound that an entry uses"),
        Column("integers", "integers equal in every bit (seeds)", lambda found: _integers(found, literals)),
    )
    by_pass = say.grouped(say.all_rows(values, "literal", "passes"), "dtype", "pass")
    lines = [by_pass[dtype, pass_] for dtype in PREDICTED for pass_ in EXACT_PASSES]
    title = f"{case} against convs side by side"
    return say.table("side_by_side", title, lines, columns, lambda rows: _literal_conclusion(rows, literals))


def _expected(found: Rows, case: str) -> str | None:
    asked = found[0]["pass"] == "forward" and case == THREAD_CASE
    return PREDICTED[found[0]["dtype"]][2] if asked else None


def _integers(found: Rows, literals: Rows) -> str | None:
    if found[0]["dtype"] != "float32":
        return None
    return say.share_of(one["integers"] and one["integers"][found[0]["pass"]] for one in literals)


def _literal_conclusion(rows: Rows, literals: Rows) -> str:
    single, double = (say.chosen(rows, dtype=d, pass_="forward")[0] for d in PREDICTED)
    kernels, worst = literals[0]["kernels"], say.greatest("share")(rows)
    within = ", which is rounding." if worst <= 1 else ", more than another order of the sums can make."
    return say.sentences(
        _on_integers(literals),
        f"At most {say.percent(worst)} of the rounding bound is used{within}" if worst else "No bit differs.",
        f"Forward, {say.seeds(literals)}: in float32 "
        f"{say.between(single['smallest'], single['absolute'])} apart (absolute{_as_expected(single)}), in "
        f"float64 {say.between(double['smallest'], double['absolute'])} (absolute{_as_expected(double)}).",
        _the_threads(single),
        *(_which_kernels(dtype, kernels[dtype]) for dtype in kernels),
    )


def _on_integers(literals: Rows) -> str:
    asked = [one["integers"] for one in literals if one["integers"]]
    if not asked:
        return "The grouped conv is not exact on integers itself (Winograd, FFT): they decide nothing here."
    if all(all(passes.values()) for passes in asked):
        return "The same function: on integers both agree in every bit, forward and in both gradients."
    return "More than rounding: on integers, where no sum is rounded, the two differ."


def _as_expected(row: dict) -> str:
    if row["expected"] is None:
        return ""
    low, high, text = PREDICTED[row["dtype"]]
    if row["absolute"] == 0:
        return ", every bit equal, as predicted"
    fits = (row["smallest"] == 0 or low <= row["smallest"]) and row["absolute"] <= high
    return f", as predicted: {text}" if fits else f"; predicted: {text}"


def _which_kernels(dtype: str, chosen: Mapping[str, Sequence[str]]) -> str:
    own, other = (" and ".join(chosen[kind]) for kind in ("grouped", "separate"))
    if own == other:
        return f"In {dtype} torch computes both by the same kernel ({own})."
    return (
        f"In {dtype} torch computes the grouped conv by the kernel {own}, the convs side by side by {other}."
    )


def _the_threads(row: dict) -> str:
    if row["expected"] is None or not row["absolute"]:
        return ""
    return f"The thread's {THREAD:.5g} is {THREAD / row['absolute']:.2g} times the greatest here."


def errors_table(values: Values) -> Table:
    """Both float32 results against float64."""
    columns = (
        say.first("pass", "pass"),
        say.greatest("grouped", "largest error of the grouped conv, greatest over seeds (absolute)"),
        say.greatest("separate", "of the convs side by side, likewise (absolute)"),
        Column("nearer", "seeds: grouped nearer / side by side nearer / equal", _nearer),
        Column("equal", "entries equal in every bit (share)", _equal_share),
        say.greatest("u", "largest difference (u |W| * |x|)"),
        say.greatest("bound", "2 gamma_K of the longest sum (u |W| * |x|)"),
    )
    found = [
        row | one["errors"][row["pass"]]
        for one in say.each(values, "literal")
        for row in say.chosen(one["passes"], dtype="float32")
    ]
    within = all(row["share"] <= 1 for row in found)
    conclusion = (
        f"{'Neither is the right one, both are rounded' if within else 'They differ by more than rounding'}: "
        "their errors against float64, and in how many seeds either has the smaller one."
    )
    by_pass = say.grouped(found, "pass")
    lines = [by_pass[pass_] for pass_ in EXACT_PASSES]
    return say.table("errors", "Which float32 result is nearer to the exact one", lines, columns, conclusion)


def _nearer(rows: Rows) -> str:
    grouped = sum(row["grouped"] < row["separate"] for row in rows)
    separate = sum(row["separate"] < row["grouped"] for row in rows)
    return f"{grouped} / {separate} / {len(rows) - grouped - separate}"


def _equal_share(rows: Rows) -> float:
    return sum(row["equal"] for row in rows) / sum(row["entries"] for row in rows)


def sweep_table(values: Values) -> Table:
    """Other convolutions: how many agree in every bit, and how far the others are apart."""
    columns = (
        Column("groups", "groups", lambda rows: str(rows[0]["groups"])),
        say.first("pass", "pass"),
        Column("cases", "convolutions (count)", len),
        Column("equal", "equal in every bit, float32 (count)", lambda rows: sum(map(_all_equal, rows))),
        say.greatest("u", "largest difference (u |W| * |x|)"),
        say.greatest("share", "largest share of the bound, entry by entry"),
        Column("exact", "integers equal in every bit (count)", lambda rows: sum(say.numbers(rows, "exact"))),
        Column("asked", "integers asked (count)", lambda rows: len(say.numbers(rows, "exact"))),
    )
    cases = say.all_rows(values, "sweep")
    found = [
        row | {"groups": case["groups"], "exact": case["integers"] and case["integers"][row["pass"]]}
        for case in cases
        for row in case["passes"]
    ]
    by_kind = say.grouped(found, "groups", "pass")
    kinds = sorted({case["groups"] for case in cases}, key=lambda kind: (isinstance(kind, str), kind))
    lines = [by_kind[kind, pass_] for kind in kinds for pass_ in EXACT_PASSES]
    title = "Other convolutions: channels, groups, kernel, stride, dilation, padding, padding mode, bias"
    return say.table("sweep", title, lines, columns, lambda rows: _sweep_conclusion(rows, cases))


def _all_equal(row: Mapping) -> bool:
    return row["equal"] == row["entries"]


def _sweep_conclusion(rows: Rows, cases: Rows) -> str:
    equal = sum(all(map(_all_equal, case["passes"])) for case in cases)
    u, share = (say.greatest(key)(rows) for key in ("u", "share"))
    within = "." if share <= 1 else ", more than another order of the sums can make."
    return (
        f"{_sweep_on_integers(rows, cases)} Of {len(cases)} convolutions {equal} agree in every bit of "
        f"float32 in all passes; the largest difference is {u:.3g} u |W| * |x|, the largest share of its "
        f"bound that an entry uses {say.percent(share)}{within}"
    )


def _sweep_on_integers(rows: Rows, cases: Rows) -> str:
    exact, asked = (sum(row[key] for row in rows) for key in ("exact", "asked"))
    if not asked:
        return "No grouped conv here is exact on integers itself: they decide nothing."
    wrong = [case["case"] for case in cases if case["integers"] and not all(case["integers"].values())]
    if wrong:
        return f"{asked - exact} of {asked} integer checks do not agree, the first for {wrong[0]}."
    return f"The equality is general: all {asked} integer checks agree in every bit."
