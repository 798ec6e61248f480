"""The tables about the split that was asked about: how far apart, on which scale, in which dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.split.case import Case
from experiments.questions.split.literal import DTYPES, FULL_FLOAT64
from experiments.questions.split.passes import PASSES, unit_round_off
from experiments.questions.split.seeds import Group, Values, groups, missing, ratios, seeds_in_words

Groups = Mapping[tuple[str, str], Group]
HEAD = {"dtype": "dtype", "pass": "pass"}


def differences(values: Values, case: Case) -> Table:
    columns = HEAD | {
        "terms": "K, longest sum (products)",
        "differing": "seeds that differ",
        "least": "largest difference, least over seeds (absolute)",
        "median": "median over seeds (absolute)",
        "largest": "greatest over seeds (absolute)",
        "expected": "expected (issue, absolute)",
    }
    found, absent = groups(values), missing(values)
    rows = [_difference_row(g, case) for g in found.values()]
    everywhere = [name for name, why in absent.items() if len(why) == len(values)]
    rows += [{"dtype": name, "pass": "not available here"} for name in everywhere]
    said = [_which_passes(found, len(values)), *_unexpected(found, case), *_exact_sums(found)]
    n = seeds_in_words(len(values))
    said += [f"{name} is not available in {len(why)} of {n}: {why[0]}." for name, why in absent.items()]
    return Table("split_differences", f"Original against split: {case.title}", columns, rows, " ".join(said))


def _difference_row(group: Group, case: Case) -> dict:
    return {
        "dtype": group.dtype,
        "pass": group.pass_,
        "terms": group.rows[0]["terms"],
        "differing": f"{group.differing} of {group.n}",
        "least": group.least("difference"),
        "median": group.median("difference"),
        "largest": group.largest("difference"),
        "expected": _range(group.expected(case)),
    }


def _range(stated: tuple[float, float] | None) -> str | None:
    if stated is None:
        return None
    return "0" if stated[1] == 0 else f"{stated[0]:.2g} to {stated[1]:.2g}"


def _which_passes(found: Groups, n: int) -> str:
    """The two gradients are one backward pass: neither comes first."""
    seeds = seeds_in_words(n)
    where = {p: [d for (d, q), g in found.items() if q == p and g.differing] for p in PASSES}
    differing = [p for p in PASSES if where[p]]
    if not differing:
        return f"No pass differs in any bit, in any dtype ({seeds})."
    if differing[0] == PASSES[0]:
        return f"The forward pass is the first that differs: in {_and(where[PASSES[0]])} ({seeds})."
    return (
        "The forward pass is equal bit for bit in every dtype; the backward pass is the first that differs "
        f"({_and(differing)}; {seeds})."
    )


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)


def _unexpected(found: Groups, case: Case) -> list[str]:
    said = []
    for g in found.values():
        outside = g.unexpected(case)
        if not outside:
            continue
        worst = max(outside, key=lambda row: row["difference"])
        chance = (
            "so it is rounding, larger or smaller by seed" if worst["share"] <= 1 else "more than rounding"
        )
        said.append(
            f"Not as the issue expects in {len(outside)} of {g.n} seeds: {g.dtype} {g.pass_}, up to "
            f"{worst['difference']:.2g} where {_range(g.expected(case))} is stated. That is "
            f"{worst['difference'] / worst['ulp']:.2g} ulps of the largest element ({worst['size']:.3g}) and "
            f"{worst['share']:.2g} of the bound: {chance}."
        )
    return said


def _exact_sums(found: Groups) -> list[str]:
    """Why float64 shows nothing on float32 values, where it shows nothing."""
    gradients = [found["float64", p] for p in PASSES[1:]]
    if any(g.largest("error_whole") or g.largest("error_split") for g in gradients):
        return []
    return [
        "In float64 both gradients are exact, not merely equal: the operands are float32 values and the "
        "output gradient is ones, so the sums fit into 53 bits. The rows with 53-bit operands show what "
        "float64 rounds where it has to."
    ]


def scales(values: Values) -> Table:
    columns = HEAD | {
        "relative": "largest difference over the tensor's largest magnitude (relative)",
        "ulps": "in ulps of the element where it is largest",
        "top_ulps": "in ulps of the tensor's largest element",
        "bound": "a-priori bound, the largest of all elements (absolute)",
        "share": "largest share of its bound that an element uses",
    }
    found = groups(values)
    rows = [
        {"dtype": g.dtype, "pass": g.pass_}
        | {key: g.largest(key) for key in ("relative", "ulps", "share")}
        | {"top_ulps": max(row["difference"] / row["ulp"] for row in g.rows), "bound": g.median("bound")}
        for g in found.values()
    ]
    return Table("split_scales", "The same differences by scale", columns, rows, _scales_in_words(found))


def _scales_in_words(found: Groups) -> str:
    worst = max(found.values(), key=lambda g: g.largest("share"))
    share = worst.largest("share")
    said = (
        f"No element differs by more than {share:.2g} of its bound ({worst.dtype} {worst.pass_})."
        if 0 < share <= 1
        else "No element differs."
        if not share
        else f"{worst.dtype} {worst.pass_}: {share:.2g} times what rounding can make of a plain sum."
    )
    return (
        f"{said} Greatest over seeds, the bound their median; ulps are those of the dtype. Bound in float32 "
        "and float64: 2 gamma_K (|W| * |x|). In 16 bits: gamma_K of float32, in which such sums are held, "
        "and gamma_r of the dtype for the r times that a result may be rounded to it. An element near 0 is "
        "many of its own ulps off, since its terms cancel: the largest element's ulp is the fairer unit."
    )


def dtype_ratios(values: Values) -> Table:
    columns = HEAD | {
        "n": "seeds with a float32 difference",
        "ratio": "difference over float32's, median (relative)",
        "power": "as a power of 2 (exponent)",
        "predicted": "ratio of unit round-offs (exponent)",
    }
    found = groups(values)
    rows = [
        _ratio_row(g, over)
        for (dtype, pass_), g in found.items()
        if dtype != "float32" and (over := ratios(g, found["float32", pass_]))
    ]
    title = "Does the difference shrink with the unit round-off?"
    return Table("split_dtype_ratio", title, columns, rows, _ratios_in_words(rows))


def _ratio_row(group: Group, over: list[float]) -> dict:
    middle = median(over)
    predicted = unit_round_off(DTYPES[group.dtype]) / unit_round_off(DTYPES["float32"])
    return {
        "dtype": group.dtype,
        "pass": group.pass_,
        "n": len(over),
        "ratio": middle,
        "power": math.log2(middle) if middle else None,
        "predicted": math.log2(predicted),
    }


def _ratios_in_words(rows: list[dict]) -> str:
    seen = [r for r in rows if r["power"] is not None]
    wide = [r for r in seen if r["dtype"] == FULL_FLOAT64]
    if not wide:
        return "No pass differs both in float32 and in float64: there is no ratio to compare."
    each = ", ".join(f"{r['pass']} 2^{r['power']:.1f}" for r in wide)
    said = f"float64 with 53-bit operands over float32: {each}; rounding predicts 2^-29, a fault 2^0."
    if len(seen) < len(rows):
        said += " A ratio of 0: no difference in that dtype, its sums being exact or rounded alike."
    below = [r["dtype"] for r in seen if r["predicted"] > 0 and r["power"] < r["predicted"]]
    if below:
        said += (
            f" In {_and(dict.fromkeys(below))} the ratio is below that of the units: rounded once or a few "
            "times a sum, float32 at every addition."
        )
    return said
