"""The table of exponents: which law the errors of the sweep follow, beside control sums in a known order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.split.factors import Rows, sweep_rows
from experiments.questions.split.laws import BLOCKED, LANES, LEFT_TO_RIGHT, slope
from experiments.questions.split.passes import PASSES
from experiments.questions.split.seeds import Values
from experiments.questions.split.sweep import DATA

_ERROR, _DIFFERENCE = "error of the original", "difference"
_AT = 1000
_NEAR = 0.05  # the controls are so regular that their intervals leave out the law that they approach


def laws(values: Values) -> Table:
    columns = {
        "source": "sums",
        "data": "numbers",
        "quantity": "rms over elements",
        "n": "points (n)",
        "exponent": "exponent of K",
        "low": "95 % from",
        "high": "to",
        "at": f"fit at K = {_AT} (u·|W|*|x|)",
        "law": "agrees with",
    }
    controls = [row for v in values.values() for row in v["controls"]]
    rows = [*_control_fits(controls), *_sweep_fits(sweep_rows(values))]
    said = (
        f"{_device_in_words(rows)} {_controls_in_words(rows)} A point is a case and layout, the median over "
        "seeds; points that are equal bit for bit (0) are left out."
    )
    return Table("split_laws", "Error against K: the exponents", columns, rows, said)


def _control_fits(rows: Rows) -> list[dict]:
    asked = (
        (LEFT_TO_RIGHT, "rms_whole", _ERROR),
        (BLOCKED, "rms_whole", _ERROR),
        (LEFT_TO_RIGHT, "rms_cut_one", "difference, cut 1 + rest"),
        (LEFT_TO_RIGHT, "rms_cut_half", "difference, cut in halves"),
    )
    found = []
    for order, key, quantity in asked:
        for data in DATA:
            chosen = [r for r in rows if (r["order"], r["data"]) == (order, data)]
            fitted = _fit(_points(chosen, key, lambda r: r["terms"]))
            found.append({"source": f"control: {order}", "data": data, "quantity": quantity} | fitted)
    return found


def _sweep_fits(rows: Rows) -> list[dict]:
    asked = (
        ("rms_whole", "float32", _ERROR),
        ("rms", "float32", _DIFFERENCE),
        ("rms", "float64", "difference, float64"),
    )
    found = []
    for pass_ in PASSES:
        for key, dtype, quantity in asked:
            for data in DATA:
                chosen = [r for r in rows if (r["pass"], r["dtype"], r["data"]) == (pass_, dtype, data)]
                fitted = _fit(_points(chosen, key, lambda r: (r["case"], r["layout"])))
                found.append({"source": pass_, "data": data, "quantity": quantity} | fitted)
    return found


def _points(
    rows: Iterable[Mapping], key: str, which: Callable[[Mapping], object]
) -> list[tuple[float, float]]:
    """(K, value) of each point. The seeds of one share its kernel: they are no points of their own."""
    seeds: dict[object, list] = {}
    for row in rows:
        seeds.setdefault(which(row), []).append((row["terms"], row[key]))
    return [(median(k for k, _ in seen), median(e for _, e in seen)) for seen in seeds.values()]


def _fit(points: Sequence[tuple[float, float]]) -> dict:
    fitted = slope([k for k, _ in points], [e for _, e in points])
    differing = sum(e > 0 for _, e in points)
    if fitted is None:
        return {"n": differing, "law": f"too few to fit: {len(points) - differing} of {len(points)} equal"}
    at = fitted["constant"] * _AT ** fitted["exponent"]
    law = law_in_words(fitted["exponent"], fitted["low"], fitted["high"])
    return {k: fitted[k] for k in ("n", "exponent", "low", "high")} | {"at": at, "law": law}


def law_in_words(exponent: float, low: float, high: float) -> str:
    """Which laws an interval agrees with: 0, 1/2 (probabilistic), 1 (the bound); else, which is near."""
    laws_ = {0.0: "constant", 0.5: "√K", 1.0: "K"}
    inside = [name for law, name in laws_.items() if low <= law <= high]
    if inside:
        return " or ".join(inside)
    near = [name for law, name in laws_.items() if abs(exponent - law) <= _NEAR]
    if near:
        return f"nearly {near[0]}"
    if high < 0:
        return "falls with K"
    if low > 1:
        return "steeper than K"
    return "between constant and √K" if high < 0.5 else "between √K and K"


def _row(rows: Rows, source: str, data: str, quantity: str) -> Mapping:
    return next(r for r in rows if (r["source"], r["data"], r["quantity"]) == (source, data, quantity))


def _power(row: Mapping) -> str:
    return f"K^{round(row['exponent'], 2) + 0.0:.2f}" if "exponent" in row else "no fit"


def _controls_in_words(rows: Rows) -> str:
    def fitted(order: str, data: str, quantity: str = _ERROR) -> str:
        return _power(_row(rows, f"control: {order}", data, quantity))

    cuts = [fitted(LEFT_TO_RIGHT, "positive", f"difference, cut {c}") for c in ("1 + rest", "in halves")]
    return (
        f"Control sums added left to right: {fitted(LEFT_TO_RIGHT, 'positive')} for positive numbers, whose "
        f"partial sums grow as K, and {fitted(LEFT_TO_RIGHT, 'zero mean')} for numbers of zero mean, whose "
        "partial sums grow as √K; probabilistic analysis predicts exponents of 0.5 and 0 (Higham, Mary, SIAM "
        f"J. Sci. Comput. 41, 2019; 42, 2020). In {BLOCKED}, each a {LANES}th as long, positive ones give "
        f"{fitted(BLOCKED, 'positive')} over these lengths. A cut after the first product changes the sum by "
        f"{cuts[0]}, one in halves by {cuts[1]}: where the split cuts decides how much of the order changes."
    )


def _device_in_words(rows: Rows) -> str:
    """The passes of this device's convolutions on positive numbers, beside the controls."""
    ordered = _row(rows, f"control: {LEFT_TO_RIGHT}", "positive", _ERROR)
    said: dict[str, list[str]] = {}
    for pass_ in PASSES:
        row = _row(rows, pass_, "positive", _ERROR)
        said.setdefault(_beside(row, ordered), []).append(f"{pass_} {_power(row)}")
    grow = "; ".join(f"{', '.join(passes)}{beside}" for beside, passes in said.items())
    return (
        "Relative to |W| * |x|, the errors of this device's float32 convolutions on positive numbers go as "
        f"{grow}; the worst case is K."
    )


def _beside(row: Mapping, ordered: Mapping) -> str:
    if "exponent" not in row or "exponent" not in ordered:
        return ""
    if row["high"] < ordered["low"]:
        why = ", as blocked, vectorised sums are" if row["at"] < ordered["at"] else ""
        return f" (flatter than left to right{why})"
    return (
        " (steeper than left to right)"
        if row["low"] > ordered["high"]
        else " (as left to right, within the intervals)"
    )
