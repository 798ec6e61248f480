"""The tables that say why: who is nearer to the exact result, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Sequence

from driftlab.report.sections import Table
from experiments.questions.split.case import MANY, Case
from experiments.questions.split.passes import PASSES
from experiments.questions.split.seeds import (
    AS_ASKED,
    Group,
    Values,
    groups,
    integers_equal,
    one_side_nearer,
    seeds_in_words,
    seeds_needed,
)
from experiments.questions.split.tables import HEAD, Groups

HALF = ("bfloat16", "float16")
_ONE_ROUNDING = 0.505  # ulps: half of one, and what the float32 sum before it was off


def accuracy(values: Values) -> Table:
    columns = HEAD | {
        "error_whole": "original to exact: largest, median over seeds (absolute)",
        "error_split": "split to exact: likewise (absolute)",
        "ulps": "original to exact, greatest (ulps of the largest element)",
        "ratio": "rms error, split over original, median (relative)",
        "nearer": "seeds: split nearer / original nearer / equal",
        "p": "p, sign test",
    }
    found = groups(values)
    rows = [
        {"dtype": g.dtype, "pass": g.pass_}
        | {key: g.median(key) for key in ("error_whole", "error_split")}
        | {"ulps": _ulps(g), "ratio": g.rms_ratio, "p": g.sign_test}
        | {"nearer": "{} / {} / {}".format(*g.nearer, g.n - sum(g.nearer))}
        for g in found.values()
    ]
    said = [accuracy_in_words(found), "Exact: the same operands, nothing rounded.", *_roundings(found)]
    return Table("split_accuracy", "Is either nearer to the exact result?", columns, rows, " ".join(said))


def _ulps(group: Group) -> float:
    return max(row["error_whole"] / row["ulp"] for row in group.rows)


def accuracy_in_words(found: Groups) -> str:
    """Whether either is more right, over all dtypes and passes; a sentence or two."""
    nearer, n, needed = one_side_nearer(found), max(g.n for g in found.values()), seeds_needed(found)
    if not any(sum(g.nearer) for g in found.values()):
        return "Neither is more right: both are as far from the exact result."
    if not nearer and n < needed:
        return f"{seeds_in_words(n)} cannot tell whether either is more right; {needed} can."
    if not nearer:
        return (
            "Neither is more right: in no dtype and pass is one nearer to the exact result by more than "
            f"luck (sign test over {n} seeds, Bonferroni)."
        )
    places = "; ".join(_who_is_nearer(g) for g in nearer)
    twice = any(g.dtype in HALF and g.pass_ == "input gradient" and (g.rms_ratio or 0) > 1 for g in nearer)
    why = " The split rounds each part's sum to 16 bits, and their sum again." if twice else ""
    return f"By a sign test (Bonferroni) neither is more right, but for {places}.{why}"


def _who_is_nearer(group: Group) -> str:
    split, original = group.nearer
    side, wins = ("split", split) if split > original else ("original", original)
    ratio = "the original is exact"
    if group.rms_ratio is not None:
        ratio = f"median rms error of the split {group.rms_ratio:.2g} times the original's"
    return (
        f"the {group.dtype} {group.pass_}, where the {side} is nearer to the exact result in {wins} of "
        f"{group.n} seeds ({ratio})"
    )


def _roundings(found: Groups) -> list[str]:
    """How often the original rounds to 16 bits, by how far it is from exact."""
    said = []
    for dtype in HALF:
        g = found.get((dtype, "input gradient"))
        if g is None:
            continue
        if g.largest("error_ulps_whole") <= _ONE_ROUNDING:
            said.append(
                f"The original's {dtype} input gradient is within half an ulp: rounded to 16 bits once, at "
                "the end."
            )
        elif _ulps(g) > _ONE_ROUNDING:
            said.append(
                f"The original's {dtype} input gradient is {_ulps(g):.2g} ulps off: it is rounded to 16 bits "
                "more than once."
            )
    return said


def causes(values: Values, case: Case) -> Table:
    columns = {
        "what": "what is compared (float32)",
        "differing": "seeds that differ",
        "largest": "largest difference over seeds (absolute)",
    }
    named = _compared(values, case)
    rows = [
        {"what": what, "differing": f"{sum(x > 0 for x in xs)} of {len(xs)}", "largest": max(xs)}
        for what, xs in named.items()
    ]
    for p in PASSES:
        equal = [v["integers"][p] for v in values.values()]
        asked = len(equal) - equal.count(None)
        differing = f"{equal.count(False)} of {asked}" if asked else "not exact here"
        rows.append({"what": f"{p} on small integers: original and split", "differing": differing})
    seen = [v["literal"]["causes"] for v in values.values()]
    said = [why_input(values), _why_weights(seen, case), _why_integers(values)]
    return Table("split_causes", "Where the difference comes from", columns, rows, " ".join(said))


def _compared(values: Values, case: Case) -> dict[str, list[float]]:
    seen = [v["literal"]["causes"] for v in values.values()]
    named = _by_part(seen, case)
    named["weight gradient of the original: its rows, which are equal on paper"] = [
        c["rows_of_one_convolution"] for c in seen
    ]
    named["input gradient: original, and original with its sum cut"] = [c["cut"] for c in seen]
    named["input gradient: original with its sum cut, and split"] = [c["kernel"] for c in seen]
    return named


def _by_part(seen: Sequence[dict], case: Case) -> dict[str, list[float]]:
    if len(case.split) > MANY:
        what = f"weight gradient of the {len(case.split)} parts: original and split"
        return {what: [max(c["weight_gradient_by_part"]) for c in seen]}
    named = {}
    for i, size in enumerate(case.split):
        printed = ", which the thread prints" if case == AS_ASKED and i == 0 else ""
        what = f"weight gradient of part {i + 1} ({_channels(size)}){printed}: original and split"
        named[what] = [c["weight_gradient_by_part"][i] for c in seen]
    return named


def _channels(size: int) -> str:
    return f"{size} output channel{'s' * (size > 1)}"


def why_input(values: Values) -> str:
    """Is it the cut of the sum, or another order in the sums of the parts?"""
    if not groups(values)["float32", "input gradient"].differing:
        return "The input gradient comes out equal, though its sum is cut between the parts."
    seen = [v["literal"]["causes"] for v in values.values()]
    cut, kernel = (max(c[k] for c in seen) for k in ("cut", "kernel"))
    if kernel == 0:
        return (
            "The input gradient differs because its sum over the output channels is cut, for no other reason."
        )
    if cut == 0:
        return (
            "The input gradient differs because the sums of the parts are added in another order (another "
            "kernel for their shapes), not by the cut itself."
        )
    return (
        "The input gradient differs for two reasons: its sum over the output channels is cut (up to "
        f"{cut:.2g}, absolute), and the sums of the parts are added in another order, by another kernel for "
        f"their shapes (up to {kernel:.2g})."
    )


def _why_weights(seen: Sequence[dict], case: Case) -> str:
    by_part = list(zip(*(c["weight_gradient_by_part"] for c in seen), strict=True))
    differing = [i for i, seeds in enumerate(by_part) if any(seeds)]
    if not differing:
        return "The sums of the weight gradient are not cut by this split, and come out equal."
    parts = ", ".join(f"part {i + 1} ({_channels(case.split[i])})" for i in differing)
    if len(differing) > MANY:
        parts = f"{len(differing)} of {len(by_part)} parts"
    differ = "differ" if len(differing) > 1 else "differs"
    return (
        f"The sums of the weight gradient are not cut by this split; {parts} {differ} all the same: another "
        "kernel for that shape adds in another order."
    )


def _why_integers(values: Values) -> str:
    equal = integers_equal(values)
    if equal is None:
        return "On integers the original is not exact itself (Winograd, FFT): they decide nothing here."
    same = "equal bit for bit in every pass" if equal else "different: this is not the order of a sum"
    return f"On small integers, whose sums are exact in any order, original and split are {same}."
