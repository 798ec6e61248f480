"""The table of exponents: which law of K the errors of the sweep follow, beside sums in a known order."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median

from driftlab.report.sections import Table
from experiments.split_gradient.passes import PASSES
from experiments.split_gradient.sweep import BLOCKED, DATA, LANES, LEFT_TO_RIGHT
from suite.showing.wording import Row, Rows, Values, all_rows, chosen, grouped

FEWEST = 6  # points of a fit; of fewer the interval says hardly anything
_ERROR = "error of the original"
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
    rows = _control_fits(all_rows(values, "controls")) + _sweep_fits(all_rows(values, "sweep"))
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
    return [
        {"source": f"control: {order}", "data": data, "quantity": quantity}
        | _fit(grouped(chosen(rows, order=order, data=data), "terms"), key)
        for order, key, quantity in asked
        for data in DATA
    ]


def _sweep_fits(rows: Rows) -> list[dict]:
    asked = (
        ("rms_whole", "float32", _ERROR),
        ("rms", "float32", "difference"),
        ("rms", "float64", "difference, float64"),
    )
    return [
        {"source": pass_, "data": data, "quantity": quantity}
        | _fit(grouped(chosen(rows, pass_=pass_, dtype=dtype, data=data), "case", "layout"), key)
        for pass_ in PASSES
        for key, dtype, quantity in asked
        for data in DATA
    ]


def _fit(points: Mapping[Hashable, Rows], key: str) -> dict:
    """Of ``key`` over K. The seeds of one point share its kernel: they are no points of their own."""
    lengths, errors = ([median(row[k] for row in seeds) for seeds in points.values()] for k in ("terms", key))
    fitted, differing = slope(lengths, errors), sum(e > 0 for e in errors)
    if fitted is None:
        return {"n": differing, "law": f"too few to fit: {len(points) - differing} of {len(points)} equal"}
    at = fitted.pop("constant") * _AT ** fitted["exponent"]
    law = law_in_words(fitted["exponent"], fitted["low"], fitted["high"])
    return fitted | {"at": at, "law": law}


def slope(lengths: Sequence[float], errors: Sequence[float]) -> dict | None:
    """The exponent p of error = c K^p, its 95 % confidence interval (Student's t), c, and n.

    None for fewer than ``FEWEST`` points above 0, or a single length.
    """
    kept = [(math.log(k), math.log(e)) for k, e in zip(lengths, errors, strict=True) if e > 0]
    if len(kept) < FEWEST or len({k for k, _ in kept}) < 2:
        return None
    from scipy.stats import linregress, t  # takes a second to import

    fit = linregress(*zip(*kept, strict=True))
    half = float(t.ppf(0.975, len(kept) - 2)) * float(fit.stderr)
    exponent = float(fit.slope)
    return {
        "exponent": exponent,
        "low": exponent - half,
        "high": exponent + half,
        "constant": math.exp(float(fit.intercept)),
        "n": len(kept),
    }


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


def _row(rows: Rows, source: str, data: str = "positive", quantity: str = _ERROR) -> Row:
    return chosen(rows, source=source, data=data, quantity=quantity)[0]


def _power(row: Row) -> str:
    return f"K^{round(row['exponent'], 2) + 0.0:.2f}" if "exponent" in row else "no fit"


def _controls_in_words(rows: Rows) -> str:
    def fitted(order: str, data: str = "positive", quantity: str = _ERROR) -> str:
        return _power(_row(rows, f"control: {order}", data, quantity))

    cuts = [fitted(LEFT_TO_RIGHT, quantity=f"difference, cut {cut}") for cut in ("1 + rest", "in halves")]
    return (
        f"Control sums added left to right: {fitted(LEFT_TO_RIGHT)} for positive numbers, whose "
        f"partial sums grow as K, and {fitted(LEFT_TO_RIGHT, 'zero mean')} for numbers of zero mean, whose "
        "partial sums grow as √K; probabilistic analysis predicts exponents of 0.5 and 0 (Higham, Mary, SIAM "
        f"J. Sci. Comput. 41, 2019; 42, 2020). In {BLOCKED}, each a {LANES}th as long, positive ones give "
        f"{fitted(BLOCKED)} over these lengths. A cut after the first product changes the sum by "
        f"{cuts[0]}, one in halves by {cuts[1]}: where the split cuts decides how much of the order changes."
    )


def _device_in_words(rows: Rows) -> str:
    """The passes of this device's convolutions on positive numbers, beside the controls."""
    ordered = _row(rows, f"control: {LEFT_TO_RIGHT}")
    said: dict[str, list[str]] = {}
    for pass_ in PASSES:
        row = _row(rows, pass_)
        said.setdefault(_beside(row, ordered), []).append(f"{pass_} {_power(row)}")
    grow = "; ".join(f"{', '.join(passes)}{beside}" for beside, passes in said.items())
    return (
        "Relative to |W| * |x|, the errors of this device's float32 convolutions on positive numbers go as "
        f"{grow}; the worst case is K."
    )


def _beside(row: Row, ordered: Row) -> str:
    if "exponent" not in row or "exponent" not in ordered:
        return ""
    if row["high"] < ordered["low"]:
        why = ", as blocked, vectorised sums are" if row["at"] < ordered["at"] else ""
        return f" (flatter than left to right{why})"
    steeper = row["low"] > ordered["high"]
    return " (steeper than left to right)" if steeper else " (as left to right, within the intervals)"
