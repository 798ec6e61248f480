"""Why the answer depends on the batch size: which layer differs first, and which layers differ at all."""

from __future__ import annotations

from driftlab.report.sections import Table
from experiments.questions.batch.kind_table import kind_table
from experiments.questions.batch.plan import Plan
from experiments.questions.batch.seeds import (
    NORM_NAMES,
    Values,
    in_ranges,
    sweep_keys,
    sweeps_of,
)


def why_tables(plan: Plan, values: Values) -> list[Table]:
    return [_first_layers(values), _kernels(values), kind_table(plan, values)]


def _first_layers(values: Values) -> Table:
    rows = []
    for key in sweep_keys(values):
        found = sweeps_of(values, *key)
        sizes = found[0]["sizes"]
        for layer in dict.fromkeys(name for s in found for name in s["first"]):
            marks = [sum(s["first"][i] == layer for s in found) for i in range(len(sizes))]
            at = dict(zip(sizes, marks, strict=True))
            rows.append(
                {
                    "norm": NORM_NAMES[key[0]],
                    "arithmetic": key[1],
                    "inputs": key[2],
                    "layer": layer or "none",
                    "sizes": in_ranges(sizes, lambda n, at=at: at[n] > 0),
                    "seeds": max(marks),
                }
            )
    first = dict.fromkeys(r["layer"] for r in rows if r["layer"] != "none")
    conclusion = (
        f"The first layer whose output changes with the batch size is always one that sums products "
        f"({', '.join(first)}); BatchNorm, ReLU and the residual add only pass on what reaches them."
        if first and all(name.rpartition(".")[2].startswith(("conv", "linear")) for name in first)
        else f"The first layers whose output changes with the batch size: {', '.join(first) or 'none'}."
    )
    columns = {
        "norm": "norms",
        "arithmetic": "arithmetic",
        "inputs": "boards",
        "layer": "first layer that differs from a batch of 1",
        "sizes": "at the batch sizes",
        "seeds": "seeds (most at a size)",
    }
    return Table("first_layers", "Where it starts", columns, rows, conclusion)


def _kernels(values: Values) -> Table:
    rows = []
    for same in zip(*(v["kernels"] for v in values.values()), strict=True):
        marks = list(zip(*(k["patterns"] for k in same), strict=True))
        at = dict(zip(same[0]["sizes"], marks, strict=True))
        rows.append(
            {
                "layer": same[0]["layer"],
                "kind": same[0]["kind"],
                "arithmetic": same[0]["arithmetic"],
                "sizes": in_ranges(same[0]["sizes"], lambda n, at=at: any(at[n])) or "none",
                "answers": max(len({0, *k["patterns"]}) for k in same),
                "difference": max(k["difference"] for k in same),
                "ulps": max(k["ulps"] for k in same),
                "bound": max((k["bound"] for k in same if k["bound"] is not None), default=None),
            }
        )
    columns = {
        "layer": "layer",
        "kind": "kind",
        "arithmetic": "arithmetic",
        "sizes": "batch sizes where it differs from a batch of 1",
        "answers": "different results, bit for bit",
        "difference": "largest difference (absolute)",
        "ulps": "the same (ulps of its largest output)",
        "bound": "share of the rounding bound 2 gamma_K (|W| * |x|)",
    }
    return Table("kernels", "One layer at a time, fed the same first row", columns, rows, _on_kernels(rows))


def _on_kernels(rows: list[dict]) -> str:
    depends = [r for r in rows if r["answers"] > 1]
    if not depends:
        return "No layer's result for a row depends on the batch size on this device."
    kinds = {k: sorted({r["kind"] for r in rows if (r in depends) == k}) for k in (True, False)}
    never = [kind for kind in kinds[False] if kind not in kinds[True]]
    most, shares = max(r["answers"] for r in depends), [r["bound"] for r in depends if r["bound"] is not None]
    said = [
        f"Fed bit for bit the same row, {' and '.join(kinds[True])} layers give it up to {most} different "
        f"results, by ranges of batch sizes: another shape is computed by another kernel or blocking, whose "
        f"sums run in another order."
    ]
    if never:
        said.append(f"{', '.join(never)}: the same bits in every batch.")
    if shares and max(shares) <= 1:
        said.append(
            f"What differs is at most {max(shares):.2g} of what another order of the same sums may change: "
            "rounding."
        )
    elif shares:
        said.append(
            f"What differs is up to {max(shares):.2g} times what another order of the same sums may change: "
            "another algorithm (Winograd, FFT), or fewer bits."
        )
    return " ".join([*said, *(_layers_in(a, depends) for a in ("float32", "float64"))])


def _layers_in(arithmetic: str, depends: list[dict]) -> str:
    names = [r["layer"] for r in depends if r["arithmetic"] == arithmetic]
    if not names:
        return f"In {arithmetic} none does, for the row tried."
    alone = " alone, so that depth adds nothing there" if names == ["policy_head.linear"] else ""
    return f"In {arithmetic} it is {', '.join(names)}{alone}."
