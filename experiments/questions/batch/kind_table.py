"""What each kind of layer does to a difference: adds its own, amplifies what it is given, or neither."""

from __future__ import annotations

import math
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.batch.plan import Plan
from experiments.questions.batch.seeds import Values, seeds_in_words, sweeps_of

BLOCK = "residual block"


def kind_table(plan: Plan, values: Values) -> Table:
    layers = [
        layer | {"inputs": i} for v in values.values() for i, found in v["layers"].items() for layer in found
    ]
    rows = [_kind(kind, [x for x in layers if x["kind"] == kind]) for kind in _in_order(layers)]
    columns = {
        "kind": "kind of layer",
        "layers": "layers, over seeds and boards",
        "adding": "of them adding a difference of their own",
        "fresh": "added by a layer itself (relative, median)",
        "most": "added by a layer itself (relative, most)",
        "gain": "gain: relative difference out / in (median)",
        "absolute_gain": "gain of absolute differences (median)",
        "factor": "|weight| / sqrt(variance + eps) (median)",
    }
    title = f"What each kind of layer does, in a batch of {plan.at} against alone"
    return Table("kinds", title, columns, rows, _on_kinds(values, {r["kind"]: r for r in rows}))


def _in_order(layers: list[dict]) -> list[str]:
    """Kinds of layer by their first place in the network, the block as a whole last."""
    kinds = list(dict.fromkeys(layer["kind"] for layer in layers))
    return [k for k in kinds if k != BLOCK] + [k for k in kinds if k == BLOCK]


def _kind(kind: str, layers: list[dict]) -> dict:
    def present(what: str) -> list[float]:
        return [layer[what] for layer in layers if layer[what] is not None]

    return {
        "kind": kind,
        "layers": len(layers),
        "adding": sum(f > 0 for f in present("fresh")),
        "fresh": median(present("fresh") or [0.0]),
        "most": max(present("fresh"), default=0.0),
        **{what: _median(present(what)) for what in ("gain", "absolute_gain", "factor")},
    }


def _median(numbers: list[float]) -> float | None:
    return median(numbers) if numbers else None


def _on_kinds(values: Values, kinds: dict[str, dict]) -> str:
    adding = [k for k, row in kinds.items() if row["adding"] and k != BLOCK]
    if not adding:
        return "No layer adds a difference of its own."
    said = [f"Differences arise in {' and '.join(adding)} layers alone."]
    norm, conv = kinds.get("BatchNorm"), kinds.get("convolution")
    if norm and conv and norm["gain"] and conv["absolute_gain"]:
        said += [_on_norms(norm, conv), _without_norms(values)]
    block = kinds.get(BLOCK)
    if block and block["gain"]:
        said += [_on_blocks(values, block["gain"])]
    return " ".join(said)


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

    deep = len(next(iter(values.values()))["sweeps"][0]["depths"]) > 1
    block = "the last block" if deep else "the conv block"
    return (
        f"With Identity in its place {block} gives values of {last('identity', 'size'):.2g} (root "
        f"mean square) instead of {last('batch', 'size'):.2g}, and differs by "
        f"{last('identity', 'relative'):.2g} of them instead of {last('batch', 'relative'):.2g} (relative, "
        "random boards, medians)."
    )


def _on_blocks(values: Values, gain: float) -> str:
    pairs = [p for v in values.values() for found in v["layers"].values() if (p := _added_up(found))]
    how = "damps" if gain < 0.995 else "amplifies" if gain > 1.005 else "keeps"
    said = f"A whole block {how} the relative difference that it is given ({gain:.3g} times, the median)"
    if not pairs:
        return f"{said}."
    predicted, measured = (median(p[i] for p in pairs) for i in (0, 1))
    return (
        f"{said} and adds its own; adding those up in squares, as independent errors add up, predicts "
        f"{predicted:.2g} (relative) after the last block, measured {measured:.2g} (medians, "
        f"{seeds_in_words(values)})."
    )


def _added_up(layers: list[dict]) -> tuple[float, float] | None:
    """After the last block: what the blocks' own additions and gains make of the difference, and measured."""
    blocks = [layer for layer in layers if layer["kind"] == BLOCK]
    if not blocks or any(b["carried"] is None or b["fresh"] is None for b in blocks):
        return None
    carried = next(x["carried"] for x in layers if x["name"] == "conv_block.act") or 0.0
    for block in blocks:
        carried = math.hypot(carried * (block["gain"] or 0.0), block["fresh"])
    return carried, blocks[-1]["carried"]
