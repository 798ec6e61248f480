"""What sums of K products should do: the control sums whose order is known, and the slope of error over K."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiments.questions.split.sweep import DATA

LANES = 16  # float32 numbers in a vector register of 512 bits
SUMS = 128  # of each length
FEWEST = 6  # points of a fit; of fewer the interval says hardly anything
# The laws are about long sums: in short ones the rounding of the products weighs as much as the additions.
LENGTHS = {
    "smoke": tuple(2**n for n in range(6, 12)),
    "small": tuple(2**n for n in range(6, 15)),
    "full": tuple(2**n for n in range(6, 17)),
}
U = 2.0**-24
LEFT_TO_RIGHT, BLOCKED = "left to right", f"{LANES} partial sums"


def measure_controls(seed: int, scale: str) -> list[dict]:
    """Float32 sums of K products by two orders that are written out here, whole and cut in two.

    As in the sweep, over |W| * |x| and in units of u: the error of the whole and, left to right, the
    difference that a cut after the first product makes, or a cut in halves.
    """
    rows = []
    for data in DATA:
        generator = np.random.default_rng(seed)
        for length in LENGTHS[scale]:
            sample = generator.standard_normal if data == "zero mean" else generator.random
            a, b = (sample((length, SUMS), dtype=np.float32) for _ in range(2))
            for order, measured in _by_order(a, b).items():
                rows.append({"data": data, "order": order, "terms": length} | measured)
    return rows


def _by_order(a: np.ndarray, b: np.ndarray) -> dict[str, dict]:
    products, exact = a * b, a.astype(np.float64) * b
    truth, scale = exact.sum(0), np.abs(exact).sum(0) * U
    whole = left_to_right(products)
    cuts = {}
    for name, at in (("one", 1), ("half", len(products) // 2)):
        cut = left_to_right(products[:at]) + left_to_right(products[at:])
        cuts[f"rms_cut_{name}"] = _rms((cut - whole) / scale)
    return {
        LEFT_TO_RIGHT: _error((whole - truth) / scale) | cuts,
        BLOCKED: _error((blocked(products) - truth) / scale),
    }


def _error(scaled: np.ndarray) -> dict:
    return {"largest_whole": float(np.abs(scaled).max()), "rms_whole": _rms(scaled)}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def left_to_right(terms: np.ndarray) -> np.ndarray:
    """[K, n] -> [n]: s = s + term, one after the other, in the dtype of the terms."""
    return np.add.accumulate(terms, axis=0)[-1]


def blocked(terms: np.ndarray) -> np.ndarray:
    """[K, n] -> [n]: every ``LANES``-th term into a sum of its own, then those in pairs, in pairs, …"""
    short = -len(terms) % LANES
    padded = np.concatenate([terms, np.zeros((short, terms.shape[1]), terms.dtype)])
    lanes = np.add.accumulate(padded.reshape(-1, LANES, terms.shape[1]), axis=0)[-1]
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    return lanes[0]


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
