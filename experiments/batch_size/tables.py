"""How large the difference is by batch size and by depth."""

from __future__ import annotations

from functools import partial

from driftlab.report.sections import Table
from experiments.batch_size.arithmetic_table import arithmetic_table
from experiments.batch_size.plan import Plan
from experiments.batch_size.seeds import NORM_NAMES, largest, largest_of, size_ranges, sweeps_of, tf32_name
from suite.showing.wording import Column, Rows, Values, counted, seeds, table

NAMED = 8  # ranges of batch sizes that a sentence names; more stand in the table alone


def size_tables(plan: Plan, values: Values) -> list[Table]:
    return [arithmetic_table(plan, values), _by_batch_size(plan, values), _by_depth(plan, values)]


def _by_batch_size(plan: Plan, values: Values) -> Table:
    found = {i: sweeps_of(values, "batch", "float32", i) for i in ("zeros", "random")}
    sizes = found["zeros"][0]["sizes"]
    marks = [tuple(s["patterns"][i] for kind in found.values() for s in kind) for i in range(len(sizes))]
    ranges = size_ranges(sizes, marks)

    def greatest(inputs: str, heading: str) -> Column:
        kind = found[inputs]
        return Column(inputs, heading, lambda part: max(s["differences"][p] for s in kind for p in part[1]))

    columns = (
        Column("sizes", "batch sizes tried with one answer, bit for bit", lambda part: part[0]),
        Column("count", "sizes tried", lambda part: len(part[1])),
        greatest("zeros", "zero boards: largest difference (absolute)"),
        greatest("random", "random boards: largest difference (absolute)"),
    )
    title = f"By batch size: float32, BatchNorm, {counted(plan.blocks, 'block')}"
    conclusion = _on_ranges(values, [text for text, _ in ranges], marks)
    return table("batch_sizes", title, ranges, columns, conclusion)


def _on_ranges(values: Values, ranges: list[str], marks: list[tuple[int, ...]]) -> str:
    ways = len({mark for mark in marks if any(mark)})
    if not ways:
        return f"All batch sizes tried give the first row the bits it has alone, {seeds(values)}."
    named = f": {', '.join(ranges)}" if len(ranges) <= NAMED else ""
    return (
        f"The first row's answer has {counted(ways, 'form')} besides that of a batch of 1, by "
        f"{counted(len(ranges), 'range')} of the {len(marks)} batch sizes tried{named}. Within a range no "
        f"bit differs, in {seeds(values)}: the shape of the batch picks how a row is computed."
    )


def _by_depth(plan: Plan, values: Values) -> Table:
    tf32 = tf32_name(values)

    def apart(norm: str, arithmetic: str) -> Column:
        heading = f"{NORM_NAMES[norm]}, {arithmetic} (absolute)"
        worst = partial(largest_of, values, norm, arithmetic, what="common")
        return Column(f"{norm} {arithmetic}", heading, worst)

    def inside(norm: str) -> Column:
        sweeps = sweeps_of(values, norm, "float32", "random")
        heading = f"last block with {NORM_NAMES[norm]}, float32 (relative)"
        return Column(norm, heading, lambda depth: largest(sweeps, depth, "relative"))

    pairs = ("batch", "float32"), ("identity", "float32"), ("batch", "float64"), ("batch", tf32)
    columns = [Column("depth", "residual blocks", int), *(apart(*p) for p in pairs), *map(inside, NORM_NAMES)]
    sizes = counted(len(plan.few), "batch size")
    title = f"Largest difference by depth, over the {sizes} that all were tried at, zero and random boards"
    return table("depths", title, range(plan.blocks + 1), columns, partial(_on_depths, tf32=tf32))


def _on_depths(rows: Rows, tf32: str) -> str:
    first, last = rows[0], rows[-1]
    if not any(row[key] for row in rows for key in row if key != "depth"):
        return "Nothing differs at any depth."
    before, after = (row["batch float32"] for row in (first, last))
    if len(rows) == 1:
        return f"Without residual blocks: {before:.2g} (absolute) in float32 with BatchNorm."
    said = (
        f"From 0 to {last['depth']} blocks the logits' absolute difference goes from {before:.2g} to "
        f"{after:.2g}{_times(first, last, 'batch float32')} in float32 with BatchNorm, and from "
        f"{first[f'batch {tf32}']:.2g} to {last[f'batch {tf32}']:.2g}"
        f"{_times(first, last, f'batch {tf32}')} in {tf32}."
    )
    inner = "; ".join(
        f"with {name} from {first[n]:.2g} to {last[n]:.2g}{_times(first, last, n)}"
        for n, name in NORM_NAMES.items()
    )
    return (
        f"{said}{_on_coarse(first, last, tf32)} Relative to what the last block gives, in float32: {inner}."
    )


def _on_coarse(first: dict, last: dict, tf32: str) -> str:
    """Why TF32 grows faster with depth, where it does."""
    fine, coarse = (_ratio(first, last, f"batch {a}") for a in ("float32", tf32))
    if not fine or not coarse or coarse < 10 * fine:
        return ""
    return (
        " There each convolution rounds its inputs to 11 bits, which makes of a changed last bit of float32 "
        "one of TF32."
    )


def _ratio(first: dict, last: dict, key: str) -> float | None:
    return last[key] / first[key] if first[key] else None


def _times(first: dict, last: dict, key: str) -> str:
    ratio = _ratio(first, last, key)
    return "" if ratio is None else f" ({ratio:,.0f} times)" if ratio >= 10 else f" ({ratio:.1f} times)"
