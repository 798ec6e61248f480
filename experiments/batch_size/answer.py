"""The answer to whoever sees another answer for another batch size."""

from __future__ import annotations

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.batch_size.figures import figures
from experiments.batch_size.plan import Plan, read
from experiments.batch_size.seeds import arithmetic_names, largest_of, tf32_name
from experiments.batch_size.suite_tables import ROUNDING, cost_ratio, same_bits, suite_tables
from experiments.batch_size.tables import size_tables
from experiments.batch_size.why_tables import BLOCK, why_tables
from suite.showing import wording as say
from suite.showing.wording import Values


def answer(settings: DictConfig, values: Values) -> Answer:
    """From what at least one seed measured."""
    plan = read(settings)
    tables = size_tables(plan, values) + ([] if plan.invariant else why_tables(plan, values))
    sentence = _in_chunks(plan, values) if plan.invariant else _sentence(plan, values)
    return Answer(sentence, [*tables, *suite_tables(plan, values)], figures(plan, values))


def _in_chunks(plan: Plan, values: Values) -> str:
    most = max(d["difference"] for s in say.all_rows(values, "sweeps") for d in s["depths"])
    said = "the same bits" if most == 0 else f"answers up to {most:.2g} (absolute) apart, which should not be"
    return (
        f"In chunks of {say.counted(plan.chunk, 'row')} the first row has {said} in every batch size, "
        f"{say.seeds(values)}, in each arithmetic (verdict: {', '.join(sorted(_own(values)))}). "
        f"{_cost(plan, values)}"
    )


def _sentence(plan: Plan, values: Values) -> str:
    moved = max(verdicts[0]["neighbours"] for verdicts in say.each(values, "verdicts"))
    if moved:
        return (
            f"Rows of a batch interact: other rows beside it move the first row's logits by {moved:.2g} "
            f"(absolute, {say.seeds(values)}). This is a leak, not rounding."
        )
    differs = largest_of(values, "batch", "float32")
    why = (_growth(plan, values), _arithmetic(values)) if differs else ()
    return say.sentences(_what(values), *why, _cost(plan, values))


def _own(values: Values) -> set[str]:
    """The verdicts on the pair in question."""
    return {verdicts[0]["verdict"] for verdicts in say.each(values, "verdicts")}


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
    return [layer for boards in say.each(values, "layers") for found in boards.values() for layer in found]


def _growth(plan: Plan, values: Values) -> str:
    deep, shallow = (largest_of(values, "batch", "float32", depth) for depth in (-1, 0))
    if not plan.blocks:
        return f"Float32 logits differ by up to {deep:.2g} (absolute)."
    times = f", {deep / shallow:.1f} times that" if shallow else ""
    said = (
        f"Float32 logits differ by up to {shallow:.2g} (absolute) without residual blocks and {deep:.2g} "
        f"with {plan.blocks}{times}"
    )
    # by which a layer of the kind multiplies the relative difference that it is given
    gains = {kind: say.middle("gain")(rows) for kind, rows in say.grouped(_layers(values), "kind").items()}
    block, norm = gains.get(BLOCK), gains.get("BatchNorm")
    if block is None or norm is None:
        return f"{said}."
    how = f"amplifies it {block**plan.blocks:.2g} times" if block > 1 else "does not amplify it"
    return (
        f"{said}: a block passes on {block:.3g} times the relative difference that it is given, a BatchNorm "
        f"{norm:.3g} times, so that depth {how} in float32."
    )


def _arithmetic(values: Values) -> str:
    narrow, wide, tf32 = (largest_of(values, "batch", a, what="common") for a in arithmetic_names(values))
    if not narrow:
        return ""
    return (
        f"{tf32_name(values)} makes it {tf32:.2g} ({say.power_of_two(tf32 / narrow)} times), float64 "
        f"{wide:.2g} ({say.power_of_two(wide / narrow)} times)."
    )


def _cost(plan: Plan, values: Values) -> str:
    chunk = plan.chunk
    ends = sorted({plan.cost_batches[0], plan.cost_batches[-1]})
    times = " and ".join(
        f"{cost_ratio(values, n, chunk):.3g} times for {say.counted(n, 'row')}" for n in ends
    )
    moved = any(p["answers"] > 1 for p in say.all_rows(values, "places", chunk=chunk))
    place = " in the same place of its chunk" if moved else ""
    gives = "gives" if same_bits(values, chunk) else "should give, and does not,"
    return (
        f"driftlab.batch_invariant(network, chunk={chunk}) {gives} a row{place} the same bits in every "
        f"batch; its time over the plain network's is {times}."
    )
