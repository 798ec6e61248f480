"""Why the answer depends on the batch size: which layer differs first, which differ, what each kind does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from driftlab.report.sections import Table
from experiments.batch_size.arithmetic_table import most_answers
from experiments.batch_size.plan import Plan
from experiments.batch_size.seeds import NORM_NAMES, in_ranges, sweeps_of
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values, each, first, greatest, middle, numbers, own

BLOCK = "residual block"


def why_tables(plan: Plan, values: Values) -> list[Table]:
    return [_first_layers(values), _kernels(values), _kinds(plan, values)]


def _first_layers(values: Values) -> Table:
    columns = (
        Column("norm", "norms", lambda line: NORM_NAMES[line["norm"]]),
        own("arithmetic", "arithmetic"),
        own("inputs", "boards"),
        Column("layer", "first layer that differs from a batch of 1", lambda line: line["layer"] or "none"),
        Column("sizes", "at the batch sizes", lambda line: _where(line["tried"], line["marks"])),
        Column("seeds", "seeds (most at a size)", lambda line: max(line["marks"])),
    )
    found = say.grouped(say.all_rows(values, "sweeps"), "norm", "arithmetic", "inputs").values()
    lines = [line for same in found for line in _layers_that_are_first(same)]
    return say.table("first_layers", "Where it starts", lines, columns, _on_first_layers)


def _layers_that_are_first(same: Rows) -> list[dict]:
    """A line for each layer that is the first to differ in some seed, "marks": in how many, size by size."""
    by_size = list(zip(*(sweep["first"] for sweep in same), strict=True))
    layers = dict.fromkeys(name for sweep in same for name in sweep["first"])
    shared = {key: same[0][key] for key in ("norm", "arithmetic", "inputs")} | {"tried": same[0]["sizes"]}
    return [shared | {"layer": x, "marks": [names.count(x) for names in by_size]} for x in layers]


def _where(sizes: Sequence[int], marks: Sequence[object]) -> str:
    """The batch sizes whose mark is not 0."""
    at = dict(zip(sizes, marks, strict=True))
    return in_ranges(sizes, lambda n: bool(at[n]))


def _on_first_layers(rows: Rows) -> str:
    names = dict.fromkeys(row["layer"] for row in rows if row["layer"] != "none")
    if names and all(name.rpartition(".")[2].startswith(("conv", "linear")) for name in names):
        return (
            f"The first layer whose output changes with the batch size is always one that sums products "
            f"({', '.join(names)}); BatchNorm, ReLU and the residual add only pass on what reaches them."
        )
    return f"The first layers whose output changes with the batch size: {', '.join(names) or 'none'}."


def _kernels(values: Values) -> Table:
    columns = (
        first("layer", "layer"),
        first("kind", "kind"),
        first("arithmetic", "arithmetic"),
        Column("sizes", "batch sizes where it differs from a batch of 1", _where_it_differs),
        Column("answers", "different results, bit for bit", most_answers),
        greatest("difference", "largest difference (absolute)"),
        greatest("ulps", "the same (ulps of its largest output)"),
        greatest("bound", "share of the rounding bound 2 gamma_K (|W| * |x|)"),
    )
    lines = say.side_by_side(values, "kernels")
    return say.table("kernels", "One layer at a time, fed the same first row", lines, columns, _on_kernels)


def _where_it_differs(same: Rows) -> str:
    marks = [any(patterns) for patterns in zip(*(k["patterns"] for k in same), strict=True)]
    return _where(same[0]["sizes"], marks) or "none"


def _on_kernels(rows: Rows) -> str:
    depends = [r for r in rows if r["answers"] > 1]
    if not depends:
        return "No layer's result for a row depends on the batch size on this device."
    kinds = {k: sorted({r["kind"] for r in rows if (r in depends) == k}) for k in (True, False)}
    never = [kind for kind in kinds[False] if kind not in kinds[True]]
    most, share = greatest("answers")(depends), greatest("bound")(depends)
    return say.sentences(
        f"Fed bit for bit the same row, {' and '.join(kinds[True])} layers give it up to {most} different "
        f"results, by ranges of batch sizes: another shape is computed by another kernel or blocking, whose "
        f"sums run in another order.",
        f"{', '.join(never)}: the same bits in every batch." if never else "",
        "" if share is None else _on_bound(share),
        *(_layers_in(a, depends) for a in ("float32", "float64")),
    )


def _on_bound(share: float) -> str:
    may = "what another order of the same sums may change"
    if share <= 1:
        return f"What differs is at most {share:.2g} of {may}: rounding."
    return f"What differs is up to {share:.2g} times {may}: another algorithm (Winograd, FFT), or fewer bits."


def _layers_in(arithmetic: str, depends: Rows) -> str:
    names = [r["layer"] for r in depends if r["arithmetic"] == arithmetic]
    if not names:
        return f"In {arithmetic} none does, for the row tried."
    alone = " alone, so that depth adds nothing there" if names == ["policy_head.linear"] else ""
    return f"In {arithmetic} it is {', '.join(names)}{alone}."


def _kinds(plan: Plan, values: Values) -> Table:
    columns = (
        first("kind", "kind of layer"),
        Column("layers", "layers, over seeds and boards", len),
        Column("adding", "of them adding a difference of their own", _adding),
        Column("fresh", "added by a layer itself (relative, median)", lambda x: middle("fresh")(x) or 0.0),
        Column("most", "added by a layer itself (relative, most)", lambda x: greatest("fresh")(x) or 0.0),
        middle("gain", "gain: relative difference out / in (median)"),
        middle("absolute_gain", "gain of absolute differences (median)"),
        middle("factor", "|weight| / sqrt(variance + eps) (median)"),
    )
    layers = [layer for boards in each(values, "layers") for found in boards.values() for layer in found]
    kinds = say.grouped(layers, "kind")
    in_order = [rows for kind, rows in kinds.items() if kind != BLOCK]  # the block as a whole comes last
    in_order += [kinds[BLOCK]] if BLOCK in kinds else []
    title = f"What each kind of layer does, in a batch of {plan.at} against alone"
    return say.table("kinds", title, in_order, columns, lambda rows: _on_kinds(values, rows))


def _adding(layers: Rows) -> int:
    return sum(fresh > 0 for fresh in numbers(layers, "fresh"))


def _on_kinds(values: Values, rows: Rows) -> str:
    kinds = {row["kind"]: row for row in rows}
    adding = [k for k, row in kinds.items() if row["adding"] and k != BLOCK]
    if not adding:
        return "No layer adds a difference of its own."
    norm, conv, block = (kinds.get(kind) for kind in ("BatchNorm", "convolution", BLOCK))
    passed_on = norm and conv and norm["gain"] and conv["absolute_gain"]
    return say.sentences(
        f"Differences arise in {' and '.join(adding)} layers alone.",
        f"{_on_norms(norm, conv)} {_without_norms(values)}" if passed_on else "",
        _on_blocks(values, block["gain"]) if block and block["gain"] else "",
    )


def _on_norms(norm: dict, conv: dict) -> str:
    gain, absolute, taken = norm["gain"], norm["absolute_gain"], conv["absolute_gain"]
    alike = "it scales difference and signal alike" if 0.8 < gain < 1.25 else "it does not scale both alike"
    restores = ": the norms give back what the convolutions take" if absolute > 1 > taken else ""
    return (
        f"A BatchNorm multiplies the relative difference by {gain:.3g}: {alike}. It multiplies the absolute "
        f"difference by {absolute:.2g}, a convolution by {taken:.2g}{restores}."
    )


def _without_norms(values: Values) -> str:
    def last(norm: str, what: str) -> float:
        found = sweeps_of(values, norm, "float32", "random")
        return median(s["depths"][-1][what] for s in found)

    deep = len(say.first_of(values)["sweeps"][0]["depths"]) > 1
    block = "the last block" if deep else "the conv block"
    return (
        f"With Identity in its place {block} gives values of {last('identity', 'size'):.2g} (root "
        f"mean square) instead of {last('batch', 'size'):.2g}, and differs by "
        f"{last('identity', 'relative'):.2g} of them instead of {last('batch', 'relative'):.2g} (relative, "
        "random boards, medians)."
    )


def _on_blocks(values: Values, gain: float) -> str:
    boards = [found for boards in each(values, "layers") for found in boards.values()]
    pairs = [p for found in boards if (p := _added_up(found))]
    how = "damps" if gain < 0.995 else "amplifies" if gain > 1.005 else "keeps"
    said = f"A whole block {how} the relative difference that it is given ({gain:.3g} times, the median)"
    if not pairs:
        return f"{said}."
    predicted, measured = (median(p[i] for p in pairs) for i in (0, 1))
    return (
        f"{said} and adds its own; adding those up in squares, as independent errors add up, predicts "
        f"{predicted:.2g} (relative) after the last block, measured {measured:.2g} (medians, "
        f"{say.seeds(values)})."
    )


def _added_up(layers: Rows) -> tuple[float, float] | None:
    """After the last block: what the blocks' own additions and gains make of the difference, and measured."""
    blocks = [layer for layer in layers if layer["kind"] == BLOCK]
    if not blocks or any(b["carried"] is None or b["fresh"] is None for b in blocks):
        return None
    carried = next(x["carried"] for x in layers if x["name"] == "conv_block.act") or 0.0
    for block in blocks:
        carried = math.hypot(carried * (block["gain"] or 0.0), block["fresh"])
    return carried, blocks[-1]["carried"]
