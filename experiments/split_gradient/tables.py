"""The tables about the split that was asked about: how far apart, on which scale, in which dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from driftlab.report.sections import Table
from experiments.split_gradient import seeds as over
from experiments.split_gradient.case import Case
from experiments.split_gradient.literal import DTYPES, FULL_FLOAT64
from experiments.split_gradient.passes import PASSES, unit_round_off
from experiments.split_gradient.seeds import Groups, differing, expected, groups, named
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values

HEAD = (say.first("dtype", "dtype"), say.first("pass", "pass"))


def differences(values: Values, case: Case) -> Table:
    found, absent, n = groups(values), over.missing(values), say.seeds(values)
    columns = (
        *HEAD,
        say.first("terms", "K, longest sum (products)"),
        Column("differing", "seeds that differ", lambda rows: f"{differing(rows)} of {len(rows)}"),
        Column("least", "largest difference, least over seeds (absolute)", say.least("difference")),
        Column("median", "median over seeds (absolute)", say.middle("difference")),
        Column("largest", "greatest over seeds (absolute)", say.greatest("difference")),
        Column("expected", "predicted (absolute)", lambda rows: _range(expected(rows, case))),
    )
    said = say.sentences(
        _which_passes(found, n),
        *(_unexpected(rows, case) for rows in found.values()),
        _exact_sums(found),
        *(f"{name} is not available in {len(why)} of {n}: {why[0]}." for name, why in absent.items()),
    )
    title = f"Original against split: {case.title}"
    made = say.table("split_differences", title, found.values(), columns, said)
    everywhere = [name for name, why in absent.items() if len(why) == len(values)]
    lacking = [{"dtype": name, "pass": "not available here"} for name in everywhere]
    return replace(made, rows=[*made.rows, *lacking])


def _range(stated: tuple[float, float] | None) -> str | None:
    if stated is None:
        return None
    return "0" if stated[1] == 0 else f"{stated[0]:.2g} to {stated[1]:.2g}"


def _which_passes(found: Groups, n: str) -> str:
    """The two gradients are one backward pass: neither comes first."""
    where = {p: [d for (d, q), g in found.items() if q == p and differing(g)] for p in PASSES}
    passes = [p for p in PASSES if where[p]]
    if not passes:
        return f"No pass differs in any bit, in any dtype ({n})."
    if passes[0] == PASSES[0]:
        return f"The forward pass is the first that differs: in {' and '.join(where[PASSES[0]])} ({n})."
    return (
        "The forward pass is equal bit for bit in every dtype; the backward pass is the first that differs "
        f"({' and '.join(passes)}; {n})."
    )


def _unexpected(rows: Rows, case: Case) -> str:
    outside = over.not_as_stated(rows, case)
    if not outside:
        return ""
    worst = max(outside, key=lambda row: row["difference"])
    chance = "so it is rounding, larger or smaller by seed" if worst["share"] <= 1 else "more than rounding"
    return (
        f"Not as predicted in {len(outside)} of {len(rows)} seeds: {named(rows)}, up to "
        f"{worst['difference']:.2g} where {_range(expected(rows, case))} is stated. That is "
        f"{worst['difference'] / worst['ulp']:.2g} ulps of the largest element ({worst['size']:.3g}) and "
        f"{worst['share']:.2g} of the bound: {chance}."
    )


def _exact_sums(found: Groups) -> str:
    """Why float64 shows nothing on float32 values, where it shows nothing."""
    rows = [row for p in PASSES[1:] for row in found["float64", p]]
    if any(row["error_whole"] or row["error_split"] for row in rows):
        return ""
    return (
        "In float64 both gradients are exact, not merely equal: the operands are float32 values and the "
        "output gradient is ones, so the sums fit into 53 bits. The rows with 53-bit operands show what "
        "float64 rounds where it has to."
    )


def top_ulps(rows: Rows, key: str) -> float:
    """The greatest over seeds, in ulps of the tensor's largest element."""
    return max(row[key] / row["ulp"] for row in rows)


def scales(values: Values) -> Table:
    columns = (
        *HEAD,
        say.greatest("relative", "largest difference over the tensor's largest magnitude (relative)"),
        say.greatest("ulps", "in ulps of the element where it is largest"),
        Column("top_ulps", "in ulps of the tensor's largest element", lambda g: top_ulps(g, "difference")),
        say.middle("bound", "a-priori bound, the largest of all elements (absolute)"),
        say.greatest("share", "largest share of its bound that an element uses"),
    )
    found = groups(values).values()
    worst = max(found, key=say.greatest("share"))
    share = max(say.numbers(worst, "share"))
    said = (
        f"No element differs by more than {share:.2g} of its bound ({named(worst)})."
        if 0 < share <= 1
        else "No element differs."
        if not share
        else f"{named(worst)}: {share:.2g} times what rounding can make of a plain sum."
    )
    said += (
        " Greatest over seeds, the bound their median; ulps are those of the dtype. Bound in float32 "
        "and float64: 2 gamma_K (|W| * |x|). In 16 bits: gamma_K of float32, in which such sums are held, "
        "and gamma_r of the dtype for the r times that a result may be rounded to it. An element near 0 is "
        "many of its own ulps off, since its terms cancel: the largest element's ulp is the fairer unit."
    )
    return say.table("split_scales", "The same differences by scale", found, columns, said)


def dtype_ratios(values: Values) -> Table:
    columns = (
        say.own("dtype", "dtype"),
        say.own("pass", "pass"),
        Column("n", "seeds with a float32 difference", lambda line: len(line["ratios"])),
        Column("ratio", "difference over float32's, median (relative)", lambda line: median(line["ratios"])),
        Column("power", "as a power of 2 (exponent)", lambda line: _exponent(median(line["ratios"]))),
        Column("predicted", "ratio of unit round-offs (exponent)", lambda line: _predicted(line["dtype"])),
    )
    found = groups(values)
    lines = [
        {"dtype": dtype, "pass": p, "ratios": quotients}
        for (dtype, p), rows in found.items()
        if dtype != "float32" and (quotients := over.ratios(rows, found["float32", p]))
    ]
    title = "Does the difference shrink with the unit round-off?"
    return say.table("split_dtype_ratio", title, lines, columns, _ratios_in_words)


def _exponent(ratio: float) -> float | None:
    return math.log2(ratio) if ratio else None


def _predicted(dtype: str) -> float:
    return math.log2(unit_round_off(DTYPES[dtype]) / unit_round_off(DTYPES["float32"]))


def _ratios_in_words(rows: list[dict]) -> str:
    seen = [r for r in rows if r["power"] is not None]
    wide = [r for r in seen if r["dtype"] == FULL_FLOAT64]
    if not wide:
        return "No pass differs both in float32 and in float64: there is no ratio to compare."
    powers = ", ".join(f"{r['pass']} 2^{r['power']:.1f}" for r in wide)
    said = f"float64 with 53-bit operands over float32: {powers}; rounding predicts 2^-29, a fault 2^0."
    if len(seen) < len(rows):
        said += " A ratio of 0: no difference in that dtype, its sums being exact or rounded alike."
    below = dict.fromkeys(r["dtype"] for r in seen if r["predicted"] > 0 and r["power"] < r["predicted"])
    if below:
        said += (
            f" In {' and '.join(below)} the ratio is below that of the units: rounded once or a few "
            "times a sum, float32 at every addition."
        )
    return said
