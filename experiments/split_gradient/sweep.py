"""Around the split that was asked about: sizes, layouts, two kinds of numbers; and control sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.split_gradient.case import LAYOUTS, Case, draw, read_case, with_53_bits
from experiments.split_gradient.passes import (
    PASSES,
    bound,
    magnitudes,
    passes,
    ratio,
    terms,
    unit_round_off,
    whole,
)
from suite.command.errors import ConfigurationError

DATA = ("zero mean", "positive")
LANES = 16  # float32 numbers in a vector register of 512 bits
SUMS = 128  # of each length
# The laws are about long sums: in short ones the rounding of the products weighs as much as the additions.
LENGTHS = {
    "smoke": tuple(2**n for n in range(6, 12)),
    "small": tuple(2**n for n in range(6, 15)),
    "full": tuple(2**n for n in range(6, 17)),
}
U = 2.0**-24
LEFT_TO_RIGHT, BLOCKED = "left to right", f"{LANES} partial sums"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def cases(settings: DictConfig) -> dict[Case, dict[str, str]]:
    """Every case of the sweep, with the factors that it belongs to and its value in each.

    Raises ConfigurationError where one of them is no case.
    """
    sweep = OmegaConf.to_container(settings.sweep)
    base = sweep.pop("base")
    found: dict[Case, dict[str, str]] = {read_case(base, "sweep.base"): {}}
    for factor, values in sweep.items():
        chosen = [values[0], values[-1]] if settings.scale.name == "smoke" else values
        for value in chosen:
            case = case_of(settings, factor, value)
            label = " + ".join(map(str, case.split)) if factor == "split" else str(value)
            found.setdefault(case, {})[factor] = label
    return found


def case_of(settings: DictConfig, factor: str, value: object) -> Case:
    """The base of the sweep with another value of a factor. Raises ConfigurationError where it is none."""
    try:
        return read_case(OmegaConf.to_container(settings.sweep.base) | {factor: value}, "sweep.base")
    except ConfigurationError as error:
        raise ConfigurationError(f"sweep.{factor}={value} does not fit: {error}") from None


def measure_sweep(swept: Mapping[Case, Mapping[str, str]], seed: int, device: str) -> list[dict]:
    """A row for each case, kind of numbers, layout, dtype and pass."""
    rows = []
    for case, factors in swept.items():
        for data in DATA:
            labels = {"factors": dict(factors), "case": str(case), "data": data}
            rows += [labels | row for row in _measure_case(case, seed, data, device)]
    return rows


def _measure_case(case: Case, seed: int, data: str, device: str) -> list[dict]:
    drawn = draw(case, seed, data)
    filled = {"float32": drawn, "float64": with_53_bits(drawn, seed)}
    magnitude, count, nearly_exact = magnitudes(drawn), terms(drawn), whole(drawn.to(torch.float64))
    rows = []
    for layout in LAYOUTS:
        for name, dtype in DTYPES.items():
            operands = filled[name].to(dtype, device, layout)
            mine, theirs = whole(operands), passes(operands, case.split)
            for p in PASSES:
                allowed = bound(case, p, magnitude[p], count[p], dtype)
                row = _apart(mine[p].cpu(), theirs[p].cpu(), magnitude[p], count[p], allowed)
                if name == "float32":  # in which float64 is exact enough to measure the distance from
                    row |= _errors(mine[p].cpu(), theirs[p].cpu(), magnitude[p], nearly_exact[p])
                rows.append({"layout": layout, "dtype": name, "pass": p} | row)
    return rows


def _apart(mine: Tensor, theirs: Tensor, magnitude: Tensor, count: Tensor, allowed: Tensor) -> dict:
    """The difference over |W| * |x|, in units of u, and K of the element in which it is largest."""
    apart = (mine.double() - theirs.double()).abs()
    scaled = ratio(apart, magnitude) / unit_round_off(mine.dtype)
    at = int(scaled.argmax()) if bool(apart.any()) else int(count.argmax())
    return {
        "terms": int(count.flatten()[at]),
        "largest": float(scaled.max()),
        "rms": float(scaled.square().mean().sqrt()),
        "share": float(ratio(apart, allowed).max()),
    }


def _errors(mine: Tensor, theirs: Tensor, magnitude: Tensor, truth: Tensor) -> dict:
    u = unit_round_off(mine.dtype)
    errors = {"whole": mine, "split": theirs}
    scaled = {n: ratio((t.double() - truth).abs(), magnitude) / u for n, t in errors.items()}
    return {f"rms_{n}": float(t.square().mean().sqrt()) for n, t in scaled.items()}


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
