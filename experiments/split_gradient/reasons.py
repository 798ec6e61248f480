"""The tables that say why: who is nearer to the exact result, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from driftlab.report.sections import Table
from experiments.split_gradient import seeds as over
from experiments.split_gradient.case import MANY, Case
from experiments.split_gradient.passes import PASSES
from experiments.split_gradient.seeds import AS_ASKED, Groups, groups
from experiments.split_gradient.tables import HEAD, top_ulps
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values

HALF = ("bfloat16", "float16")
_ONE_ROUNDING = 0.505  # ulps: half of one, and what the float32 sum before it was off


def accuracy(values: Values) -> Table:
    columns = (
        *HEAD,
        say.middle("error_whole", "original to exact: largest, median over seeds (absolute)"),
        say.middle("error_split", "split to exact: likewise (absolute)"),
        Column("ulps", "original to exact, greatest (ulps of the largest element)", _off),
        Column("ratio", "rms error, split over original, median (relative)", over.rms_ratio),
        Column("nearer", "seeds: split nearer / original nearer / equal", _who_and_equal),
        Column("p", "p, sign test", over.sign_test),
    )
    found = groups(values)
    exact = "Exact: the same operands, nothing rounded."
    said = say.sentences(accuracy_in_words(found), exact, *(_roundings(found, dtype) for dtype in HALF))
    return say.table("split_accuracy", "Is either nearer to the exact result?", found.values(), columns, said)


def _off(rows: Rows) -> float:
    return top_ulps(rows, "error_whole")


def _who_and_equal(rows: Rows) -> str:
    split, original = over.nearer(rows)
    return f"{split} / {original} / {len(rows) - split - original}"


def accuracy_in_words(found: Groups) -> str:
    """Whether either is more right, over all dtypes and passes; a sentence or two."""
    nearer, n = over.one_side_nearer(found), max(len(rows) for rows in found.values())
    if not any(sum(over.nearer(rows)) for rows in found.values()):
        return "Neither is more right: both are as far from the exact result."
    if not nearer and n < (needed := over.seeds_needed(found)):
        return f"{say.seeds(n)} cannot tell whether either is more right; {needed} can."
    if not nearer:
        return (
            "Neither is more right: in no dtype and pass is one nearer to the exact result by more than "
            f"luck (sign test over {n} seeds, Bonferroni)."
        )
    places = "; ".join(_who_is_nearer(rows) for rows in nearer)
    halves = [rows for rows in nearer if rows[0]["dtype"] in HALF and rows[0]["pass"] == "input gradient"]
    twice = any((over.rms_ratio(rows) or 0) > 1 for rows in halves)
    why = " The split rounds each part's sum to 16 bits, and their sum again." if twice else ""
    return f"By a sign test (Bonferroni) neither is more right, but for {places}.{why}"


def _who_is_nearer(rows: Rows) -> str:
    split, original = over.nearer(rows)
    side, wins = ("split", split) if split > original else ("original", original)
    ratio = "the original is exact"
    if (found := over.rms_ratio(rows)) is not None:
        ratio = f"median rms error of the split {found:.2g} times the original's"
    return (
        f"the {over.named(rows)}, where the {side} is nearer to the exact result in {wins} of "
        f"{len(rows)} seeds ({ratio})"
    )


def _roundings(found: Groups, dtype: str) -> str:
    """How often the original rounds to 16 bits, by how far it is from exact."""
    rows, who = found.get((dtype, "input gradient")), f"The original's {dtype} input gradient is"
    if rows is None:
        return ""
    if say.greatest("error_ulps_whole")(rows) <= _ONE_ROUNDING:
        return f"{who} within half an ulp: rounded to 16 bits once, at the end."
    if _off(rows) > _ONE_ROUNDING:
        return f"{who} {_off(rows):.2g} ulps off: it is rounded to 16 bits more than once."
    return ""


def causes(values: Values, case: Case) -> Table:
    columns = (
        Column("what", "what is compared (float32)", itemgetter(0)),
        Column("differing", "seeds that differ", itemgetter(1)),
        Column("largest", "largest difference over seeds (absolute)", itemgetter(2)),
    )
    seen = say.each(values, "literal", "causes")
    lines = [(what, say.share_of(x > 0 for x in xs), max(xs)) for what, xs in _compared(seen, case).items()]
    for p in PASSES:
        asked = [equal for equal in say.each(values, "integers", p) if equal is not None]
        differing = say.share_of(not equal for equal in asked) if asked else "not exact here"
        lines.append((f"{p} on small integers: original and split", differing, None))
    said = say.sentences(why_input(values), _why_weights(seen, case), _why_integers(values))
    return say.table("split_causes", "Where the difference comes from", lines, columns, said)


def _compared(seen: Sequence[dict], case: Case) -> dict[str, list[float]]:
    """What is compared -> the largest difference in each seed."""
    named = {}
    if len(case.split) > MANY:
        what = f"weight gradient of the {len(case.split)} parts: original and split"
        named[what] = [max(c["weight_gradient_by_part"]) for c in seen]
    for i, size in enumerate(case.split if not named else ()):
        printed = ", which the thread prints" if case == AS_ASKED and i == 0 else ""
        what = f"weight gradient of part {i + 1} ({_channels(size)}){printed}: original and split"
        named[what] = [c["weight_gradient_by_part"][i] for c in seen]
    once = {
        "weight gradient of the original: its rows, which are equal on paper": "rows_of_one_convolution",
        "input gradient: original, and original with its sum cut": "cut",
        "input gradient: original with its sum cut, and split": "kernel",
    }
    return named | {what: [c[key] for c in seen] for what, key in once.items()}


def _channels(size: int) -> str:
    return say.counted(size, "output channel")


def why_input(values: Values) -> str:
    """Is it the cut of the sum, or another order in the sums of the parts?"""
    if not over.differing(groups(values)["float32", "input gradient"]):
        return "The input gradient comes out equal, though its sum is cut between the parts."
    cut, kernel = (max(say.each(values, "literal", "causes", key)) for key in ("cut", "kernel"))
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
    differing = [i for i, found in enumerate(by_part) if any(found)]
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
    equal = over.integers_equal(values)
    if equal is None:
        return "On integers the original is not exact itself (Winograd, FFT): they decide nothing here."
    same = "equal bit for bit in every pass" if equal else "different: this is not the order of a sum"
    return f"On small integers, whose sums are exact in any order, original and split are {same}."
