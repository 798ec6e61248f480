"""The answer to whoever sees another answer for another batch size."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.questions.batch.figures import figures
from experiments.questions.batch.kind_table import BLOCK
from experiments.questions.batch.plan import Plan, read
from experiments.questions.batch.seeds import (
    Values,
    arithmetic_names,
    counted,
    largest_of,
    power,
    seeds_in_words,
    sweep_keys,
    sweeps_of,
    tf32_name,
)
from experiments.questions.batch.suite_tables import ROUNDING, cost_ratio, same_bits, suite_tables
from experiments.questions.batch.tables import size_tables
from experiments.questions.batch.why_tables import why_tables


def answer(settings: DictConfig, values: Values) -> Answer:
    """From what at least one seed measured."""
    plan = read(settings)
    tables = size_tables(plan, values) + ([] if plan.invariant else why_tables(plan, values))
    sentence = _in_chunks(plan, values) if plan.invariant else _sentence(plan, values)
    return Answer(sentence, [*tables, *suite_tables(plan, values)], figures(plan, values))


def _in_chunks(plan: Plan, values: Values) -> str:
    found = [d for key in sweep_keys(values) for s in sweeps_of(values, *key) for d in s["depths"]]
    most = max(d["difference"] for d in found)
    said = "the same bits" if most == 0 else f"answers up to {most:.2g} (absolute) apart, which should not be"
    return (
        f"In chunks of {counted(plan.chunk, 'row')} the first row has {said} in every batch size, "
        f"{seeds_in_words(values)}, in each arithmetic (verdict: {', '.join(sorted(_own(values)))}). "
        f"{_cost(plan, values)}"
    )


def _sentence(plan: Plan, values: Values) -> str:
    moved = max(v["verdicts"][0]["neighbours"] for v in values.values())
    if moved:
        return (
            f"Rows of a batch interact: other rows beside it move the first row's logits by {moved:.2g} "
            f"(absolute, {seeds_in_words(values)}). This is a leak, not rounding."
        )
    said = [_what(values)]
    if largest_of(values, "batch", "float32"):
        said += [_growth(plan, values), _arithmetic(values)]
    return " ".join([*said, _cost(plan, values)])


def _own(values: Values) -> set[str]:
    """The verdicts on the pair in question."""
    return {v["verdicts"][0]["verdict"] for v in values.values()}


def _what(values: Values) -> str:
    if not _own(values) <= ROUNDING:
        said = ", ".join(sorted(_own(values)))
        return (
            f"What other rows hold does not matter; driftlab's verdict on a batch against row by row: {said}."
        )
    if not largest_of(values, "batch", "float32"):
        return "No batch size that was tried changes a bit of the answer in float32."
    adding = {x["kind"] for x in _layers(values) if x["fresh"]}
    innocent = "" if "BatchNorm" in adding else " and no fault of BatchNorm, which adds nothing of its own"
    return (
        f"It is rounding, no leak between rows{innocent}: another batch size is another shape, for which the "
        "library takes another kernel or blocking that sums in another order."
    )


def _layers(values: Values) -> list[dict]:
    return [layer for v in values.values() for found in v["layers"].values() for layer in found]


def _growth(plan: Plan, values: Values) -> str:
    deep, shallow = (largest_of(values, "batch", "float32", depth) for depth in (-1, 0))
    if not plan.blocks:
        return f"Float32 logits differ by up to {deep:.2g} (absolute)."
    times = f", {deep / shallow:.1f} times that" if shallow else ""
    said = (
        f"Float32 logits differ by up to {shallow:.2g} (absolute) without residual blocks and {deep:.2g} "
        f"with {plan.blocks}{times}"
    )
    block, norm = (_gain(values, kind) for kind in (BLOCK, "BatchNorm"))
    if block is None or norm is None:
        return f"{said}."
    how = f"amplifies it {block**plan.blocks:.2g} times" if block > 1 else "does not amplify it"
    return (
        f"{said}: a block passes on {block:.3g} times the relative difference that it is given, a BatchNorm "
        f"{norm:.3g} times, so that depth {how} in float32."
    )


def _gain(values: Values, kind: str) -> float | None:
    """By which a layer of the kind multiplies the relative difference that it is given, the median."""
    gains = [x["gain"] for x in _layers(values) if x["kind"] == kind and x["gain"] is not None]
    return median(gains) if gains else None


def _arithmetic(values: Values) -> str:
    narrow, wide, tf32 = (largest_of(values, "batch", a, what="common") for a in arithmetic_names(values))
    if not narrow:
        return ""
    return (
        f"{tf32_name(values)} makes it {tf32:.2g} ({power(tf32 / narrow)} times), float64 {wide:.2g} "
        f"({power(wide / narrow)} times)."
    )


def _cost(plan: Plan, values: Values) -> str:
    chunk = plan.chunk
    ends = sorted({plan.cost_batches[0], plan.cost_batches[-1]})
    times = " and ".join(f"{cost_ratio(values, n, chunk):.2g} times for {counted(n, 'row')}" for n in ends)
    moved = any(p["answers"] > 1 for v in values.values() for p in v["places"] if p["chunk"] == chunk)
    place = " in the same place of its chunk" if moved else ""
    gives = "gives" if same_bits(values, chunk) else "should give, and does not,"
    return (
        f"driftlab.batch_invariant(network, chunk={chunk}) {gives} a row{place} the same bits in every "
        f"batch; its time over the plain network's is {times}."
    )
