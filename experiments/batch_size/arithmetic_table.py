"""How large the difference is in each arithmetic, with BatchNorm and with Identity in its place."""

from __future__ import annotations

from driftlab.report.sections import Table
from driftlab.rounding import HALFWAY
from experiments.batch_size.arithmetic import EMULATED, TF32
from experiments.batch_size.plan import Plan
from experiments.batch_size.seeds import NORM_NAMES, arithmetic_names, largest, largest_of, sweeps_of, ulp
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values, all_rows, counted, first, power_of_two, sentences

# Of the network in question with BatchNorm, as predicted beforehand and as the thread gives it.
EXPECTED = {
    "float32": "1.5e-7 without blocks, 6e-7 with 19 (predicted)",
    "float64": "below 1e-16 (predicted; thread)",
    TF32: "1e-8 without blocks, 1e-3 with 19 (thread)",
    EMULATED: "1e-8 without blocks, 1e-3 with 19 (thread, on a GPU)",
}
EXPECTED_FLOAT32 = 1.5e-7, 6e-7  # without blocks and with 19
LITERAL = {"filters": 64, "planes": 2, "board": (7, 6), "moves": 7}


def arithmetic_table(plan: Plan, values: Values) -> Table:
    deep = f"largest difference, {counted(plan.blocks, 'block')} (absolute)"
    columns = [
        Column("norm", "norms", lambda found: NORM_NAMES[found[0]["norm"]]),
        first("arithmetic", "arithmetic"),
        first("inputs", "boards"),
        Column("sizes", "batch sizes tried", lambda found: len(found[0]["sizes"])),
        Column("shallow", "largest difference, 0 blocks (absolute)", lambda found: largest(found, 0)),
        Column("deep", deep, lambda found: largest(found, -1)),
        Column("ulps", "the same (ulps of the seed's largest logit)", _in_ulps),
        Column("logit", "largest logit (absolute)", lambda found: largest(found, -1, "logit")),
        Column("answers", "different answers, bit for bit (most in a seed)", most_answers),
        Column("expected", "expected (absolute)", _expected),
    ]
    left_out = {"shallow"} if not plan.blocks else set()
    left_out |= {"expected"} if not _is_literal(plan) else set()
    return say.table(
        "differences",
        "The first row's logits, in any batch against alone",
        say.grouped(all_rows(values, "sweeps"), "norm", "arithmetic", "inputs").values(),
        [column for column in columns if column.key not in left_out],
        _arithmetic_conclusion(plan, values),
    )


def _in_ulps(found: Rows) -> float:
    deep = [s["depths"][-1] for s in found]
    return max(d["difference"] / ulp(d["logit"], found[0]["arithmetic"]) for d in deep)


def most_answers(found: Rows) -> int:
    """How many bit patterns one seed has at most, that of a batch of 1 among them."""
    return max(len({0, *s["patterns"]}) for s in found)


def _expected(found: Rows) -> str | None:
    if found[0]["norm"] == "identity":  # the thread tried zero boards alone
        return "0 (thread)" if found[0]["inputs"] == "zeros" else None
    return EXPECTED[found[0]["arithmetic"]]


def _arithmetic_conclusion(plan: Plan, values: Values) -> str:
    names = arithmetic_names(values)
    size, common = (
        {a: largest_of(values, "batch", a, what=what) for a in names} for what in ("difference", "common")
    )
    if not any(size.values()):
        return f"In {say.seeds(values)} no batch size changes a bit, in any arithmetic."
    literal = _is_literal(plan)
    return sentences(
        f"Largest difference with BatchNorm, {say.seeds(values)}: {size['float32']:.2g} in float32.",
        _beside_float32(plan, common, names[-1]) if common["float32"] else "",
        _beside_expected(values) if literal else "",
        _on_float64(values) if literal else "",
        "" if plan.invariant else _on_identity(plan, values),
    )


def _beside_float32(plan: Plan, size: dict[str, float], tf32: str) -> str:
    wide, narrow = (size[a] / size["float32"] for a in ("float64", tf32))
    follows = (
        "follows the unit round-off, as rounding does and a leak between rows does not"
        if wide < 1 / HALFWAY
        else "does not follow the unit round-off, as rounding would"
    )
    tried = counted(len(plan.few), "batch size")
    return (
        f"Over the {tried} that all were tried at, float64 makes it {size['float64']:.2g}, "
        f"{power_of_two(wide)} times float32's (rounding predicts about 2^-29), {tf32} {size[tf32]:.2g}, "
        f"{power_of_two(narrow)} times (its operands keep 13 bits fewer, its sums do not): the difference "
        f"{follows}."
    )


def _is_literal(plan: Plan) -> bool:
    return plan.blocks == 19 and plan.network == LITERAL and not plan.invariant


def _beside_expected(values: Values) -> str:
    measured = [largest_of(values, "batch", "float32", depth) for depth in (0, -1)]
    times = " and ".join(f"{m / e:.2g}" for m, e in zip(measured, EXPECTED_FLOAT32, strict=True))
    return (
        f"In float32 that is {times} times what was expected (0 and 19 blocks): which kernels there are, and "
        "in which order they sum, is the library's and the processor's."
    )


def _on_float64(values: Values) -> str:
    found = [s for inputs in ("zeros", "random") for s in sweeps_of(values, "batch", "float64", inputs)]
    worst = max((d for s in found for d in s["depths"]), key=lambda d: d["difference"])
    ulps = worst["difference"] / ulp(worst["logit"], "float64")
    holds = "below" if worst["difference"] < 1e-16 else "not below"
    return (
        f"float64's largest, at any depth, is {worst['difference']:.2g}, {holds} the 1e-16 expected: "
        f"{ulps:.2g} ulps of that network's largest logit ({worst['logit']:.2g})."
    )


def _on_identity(plan: Plan, values: Values) -> str:
    zeros, random = (
        largest(sweeps_of(values, "identity", "float32", inputs), -1) for inputs in ("zeros", "random")
    )
    signal = largest(sweeps_of(values, "identity", "float32", "zeros"), -1, "signal")
    empty = (
        "the logits are the last layer's bias, bit for bit, since convolutions without bias keep zeros exact"
        if signal == 0
        else f"the logits differ from the last bias by up to {signal:.2g}"
    )
    rest = sweeps_of(values, "identity", "float32", "random")
    holds = "; the thread's absolute zero holds for zero boards alone" if random > zeros == 0 else ""
    mine, theirs = (
        largest(sweeps_of(values, norm, "float32", "random"), -1, "relative") for norm in NORM_NAMES
    )
    last = f"the last of {counted(plan.blocks, 'block')}" if plan.blocks else "the conv block"
    return (
        f"With Identity for BatchNorm, zero boards give {zeros:.2g}: {empty}. Random boards give "
        f"{random:.2g} on a signal (logits less bias) of {largest(rest, -1, 'signal'):.2g}{holds}. "
        f"What {last} gives differs by {theirs:.2g} with Identity and {mine:.2g} with BatchNorm (relative)."
    )
