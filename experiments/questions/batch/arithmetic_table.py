"""How large the difference is in each arithmetic, with BatchNorm and with Identity in its place."""

from __future__ import annotations

from driftlab.evidence import HALFWAY
from driftlab.report.sections import Table
from experiments.questions.batch.arithmetic import EMULATED, TF32
from experiments.questions.batch.plan import Plan
from experiments.questions.batch.seeds import (
    NORM_NAMES,
    Values,
    arithmetic_names,
    counted,
    largest,
    largest_of,
    power,
    seeds_in_words,
    sweep_keys,
    sweeps_of,
    ulp,
)

# Of the network in question with BatchNorm, as the issue and the thread give it.
EXPECTED = {
    "float32": "1.5e-7 without blocks, 6e-7 with 19 (issue)",
    "float64": "below 1e-16 (issue, thread)",
    TF32: "1e-8 without blocks, 1e-3 with 19 (thread)",
    EMULATED: "1e-8 without blocks, 1e-3 with 19 (thread, on a GPU)",
}
EXPECTED_FLOAT32 = 1.5e-7, 6e-7  # without blocks and with 19
LITERAL = {"filters": 64, "planes": 2, "board": (7, 6), "moves": 7}


def arithmetic_table(plan: Plan, values: Values) -> Table:
    columns = {
        "norm": "norms",
        "arithmetic": "arithmetic",
        "inputs": "boards",
        "sizes": "batch sizes tried",
        "shallow": "largest difference, 0 blocks (absolute)",
        "deep": f"largest difference, {counted(plan.blocks, 'block')} (absolute)",
        "ulps": "the same (ulps of the seed's largest logit)",
        "logit": "largest logit (absolute)",
        "answers": "different answers, bit for bit (most in a seed)",
        "expected": "expected (absolute)",
    }
    if not plan.blocks:
        del columns["shallow"]
    if not _is_literal(plan):
        del columns["expected"]
    rows = [{c: row[c] for c in columns} for row in (_row(values, key) for key in sweep_keys(values))]
    title = "The first row's logits, in any batch against alone"
    return Table("differences", title, columns, rows, _arithmetic_conclusion(plan, values))


def _row(values: Values, key: tuple[str, str, str]) -> dict:
    norm, arithmetic, inputs = key
    found = sweeps_of(values, *key)
    deep = [s["depths"][-1] for s in found]
    return {
        "norm": NORM_NAMES[norm],
        "arithmetic": arithmetic,
        "inputs": inputs,
        "sizes": len(found[0]["sizes"]),
        "shallow": largest(found, 0),
        "deep": largest(found, -1),
        "ulps": max(d["difference"] / ulp(d["logit"], arithmetic) for d in deep),
        "logit": max(d["logit"] for d in deep),
        "answers": max(len({0, *s["patterns"]}) for s in found),
        "expected": _expected(norm, arithmetic, inputs),
    }


def _expected(norm: str, arithmetic: str, inputs: str) -> str | None:
    if norm == "identity":  # the thread tried zero boards alone
        return "0 (thread)" if inputs == "zeros" else None
    return EXPECTED[arithmetic]


def _arithmetic_conclusion(plan: Plan, values: Values) -> str:
    names = arithmetic_names(values)
    size = {a: largest_of(values, "batch", a) for a in names}
    if not any(size.values()):
        return f"In {seeds_in_words(values)} no batch size changes a bit, in any arithmetic."
    said = [f"Largest difference with BatchNorm, {seeds_in_words(values)}: {size['float32']:.2g} in float32."]
    common = {a: largest_of(values, "batch", a, what="common") for a in names}
    if common["float32"]:
        said.append(_beside_float32(plan, common, names[-1]))
    if plan.invariant:
        return " ".join(said)
    said += [_beside_expected(values), _on_float64(values)] if _is_literal(plan) else []
    return " ".join([*said, _on_identity(plan, values)])


def _beside_float32(plan: Plan, size: dict[str, float], tf32: str) -> str:
    wide, narrow = (size[a] / size["float32"] for a in ("float64", tf32))
    follows = (
        "follows the unit round-off, as rounding does and a leak between rows does not"
        if wide < 1 / HALFWAY
        else "does not follow the unit round-off, as rounding would"
    )
    return (
        f"Over the {counted(len(plan.few), 'batch size')} that all were tried at, float64 makes it "
        f"{size['float64']:.2g}, {power(wide)} times float32's (rounding predicts about 2^-29), {tf32} "
        f"{size[tf32]:.2g}, {power(narrow)} times (its operands keep 13 bits fewer, its sums do not): the "
        f"difference {follows}."
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
    depths = [
        d for i in ("zeros", "random") for s in sweeps_of(values, "batch", "float64", i) for d in s["depths"]
    ]
    worst = max(depths, key=lambda d: d["difference"])
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
