"""The answers to the questions of the threads: split gradient, batch size, gradient check.

Those about groups are among the thresholds: equal bits on integers, the share of the rounding bound.
"""

from __future__ import annotations

from docs.note.values.published import (
    Row,
    added,
    exponent,
    parts,
    proportion,
    row,
    rows,
    short,
    thousands,
)

SPLIT = "split_gradient/tables/split_"
BATCH = "batch_size/tables/"
CHECK = "gradient_check/tables/"
PASSES = {"forward": "forward", "input": "input gradient"}


def numbers() -> dict[str, dict]:
    return {"split": _split(), "batch": _batch(), "check": _check()}


def _split() -> dict:
    passes = {p: row(f"{SPLIT}differences.csv", dtype="float32", **{"pass": p}) for p in PASSES.values()}
    ratio = row(f"{SPLIT}dtype_ratio.csv", dtype="float64, 53-bit operands", **{"pass": "input gradient"})
    swept = next(r for r in rows(f"{SPLIT}sweep.csv") if (r["factor"], r["value"]) == ("dtype", "float32"))
    return {
        **{f"{key}_differs": proportion(*parts(passes[p]["seeds that differ"])) for key, p in PASSES.items()},
        "least": short(float(passes["input gradient"]["largest difference, least over seeds (absolute)"])),
        "most": short(float(passes["input gradient"]["greatest over seeds (absolute)"])),
        "sum": thousands(int(passes["input gradient"]["K, longest sum (products)"])),
        "ratio": short(float(ratio["as a power of 2 (exponent)"]), 3),
        "forward_equal": proportion(*parts(swept["forward: bit-equal (count)"])),
        "input_equal": proportion(*parts(swept["input gradient: bit-equal (count)"])),
    }


def _batch() -> dict:
    differences = rows(f"{BATCH}differences.csv")
    deepest = "largest difference, 19 blocks (absolute)"
    norm = [r for r in differences if r["norms"] == "BatchNorm"]
    most = {a: max(float(r[deepest]) for r in norm if r["arithmetic"] == a) for a in ("float32", "float64")}
    return {
        **{name: short(value) for name, value in most.items()},
        "ratio": exponent(most["float64"] / most["float32"]),
        **{f"sizes{key}": _sizes(norm, dtype) for key, dtype in (("", "float32"), ("_float64", "float64"))},
        "norms": _adding("BatchNorm"),
        "convolutions": _adding("convolution"),
    }


def _sizes(differences: list[Row], arithmetic: str) -> str:
    """At how many batch sizes an arithmetic was tried."""
    (sizes,) = {r["batch sizes tried"] for r in differences if r["arithmetic"] == arithmetic}
    return sizes


def _adding(kind: str) -> dict[str, str]:
    """How many layers of a kind add a difference of their own, fed the row that they are fed alone."""
    found = row(f"{BATCH}kinds.csv", kind_of_layer=kind)
    own, n = found["of them adding a difference of their own"], found["layers, over seeds and boards"]
    return proportion(int(own), int(n))


def _check() -> dict:
    literal = {r["dtype"]: r for r in rows(f"{CHECK}literal.csv")}
    planted = rows(f"{CHECK}planted.csv")
    found = {
        dtype: {
            "points": thousands(int(r["points (n)"])),
            "low": short(float(r["ratio, 5 %"]), 4),
            "high": short(float(r["ratio, 95 %"]), 4),
        }
        for dtype, r in literal.items()
    }
    for tool in ("driftlab", "gradcheck"):
        column = f"{tool}: right answers (of n seeds)"
        kinds = ("right", "wrong")
        found[tool] = {k: added(r[column] for r in planted if r["its gradient is"] == k) for k in kinds}
    spacing = float(literal["float32"]["spacing of the loss / eps (absolute)"])
    return found | {"spacing": short(spacing, 3)}
