"""The answers to the questions of the four threads: split gradient, groups, batch size, gradient check."""

from __future__ import annotations

from docs.note.values.published import (
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
GROUPS = "group_semantics/tables/sweep.csv"
BATCH = "batch_size/tables/"
CHECK = "gradient_check/tables/"
PASSES = {"forward": "forward", "input": "input gradient"}


def numbers() -> dict[str, dict]:
    return {"split": _split(), "groups": _groups(), "batch": _batch(), "check": _check()}


def _split() -> dict:
    passes = {p: row(f"{SPLIT}differences.csv", dtype="float32", **{"pass": p}) for p in PASSES.values()}
    ratio = row(f"{SPLIT}dtype_ratio.csv", dtype="float64, 53-bit operands", **{"pass": "input gradient"})
    swept = next(r for r in rows(f"{SPLIT}sweep.csv") if (r["factor"], r["value"]) == ("dtype", "float32"))
    cut = "input gradient: original with its sum cut, and split"
    return {
        **{f"{key}_differs": proportion(*parts(passes[p]["seeds that differ"])) for key, p in PASSES.items()},
        "least": short(float(passes["input gradient"]["largest difference, least over seeds (absolute)"])),
        "most": short(float(passes["input gradient"]["greatest over seeds (absolute)"])),
        "sum": thousands(int(passes["input gradient"]["K, longest sum (products)"])),
        "ratio": short(float(ratio["as a power of 2 (exponent)"]), 3),
        "forward_equal": proportion(*parts(swept["forward: bit-equal (count)"])),
        "input_equal": proportion(*parts(swept["input gradient: bit-equal (count)"])),
        "cut": row(f"{SPLIT}causes.csv", **{"what_is_compared_(float32)": cut})["seeds that differ"],
    }


def _groups() -> dict:
    sweep = rows(GROUPS)
    equal = sum(int(r["equal in every bit, float32 (count)"]) for r in sweep)
    return {"equal": proportion(equal, sum(int(r["convolutions (count)"]) for r in sweep))}


def _batch() -> dict:
    differences = rows(f"{BATCH}differences.csv")
    deepest = "largest difference, 19 blocks (absolute)"
    norm = [r for r in differences if r["norms"] == "BatchNorm"]
    most = {a: max(float(r[deepest]) for r in norm if r["arithmetic"] == a) for a in ("float32", "float64")}
    places = [
        float(r["largest difference from the first place (absolute)"]) for r in rows(f"{BATCH}places.csv")
    ]
    return {
        **{name: short(value) for name, value in most.items()},
        "ratio": exponent(most["float64"] / most["float32"]),
        "sizes": rows(f"{BATCH}batch_sizes.csv")[0]["sizes tried"],
        "norms": _adding("BatchNorm"),
        "convolutions": _adding("convolution"),
        "places": short(max(places)),
    }


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
            "within": r["points within 1 % (%)"],
        }
        for dtype, r in literal.items()
    }
    for tool in ("driftlab", "gradcheck"):
        column = f"{tool}: right answers (of n seeds)"
        kinds = ("right", "wrong")
        found[tool] = {k: added(r[column] for r in planted if r["its gradient is"] == k) for k in kinds}
    spacing = float(literal["float32"]["spacing of the loss / eps (absolute)"])
    return found | {"networks": f"{len(planted)}", "spacing": short(spacing, 3)}
