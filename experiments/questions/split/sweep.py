"""Around the split that was asked about: one size at a time, both layouts, two kinds of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.errors import ConfigurationError
from experiments.questions.split.case import LAYOUTS, Case, draw, read_case, with_53_bits
from experiments.questions.split.passes import (
    PASSES,
    bound,
    magnitudes,
    passes,
    ratio,
    terms,
    unit_round_off,
    whole,
)

DATA = ("zero mean", "positive")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def cases(settings: DictConfig) -> dict[Case, dict[str, str]]:
    """Every case of the sweep, with the factors that it belongs to and its value in each.

    Raises ConfigurationError where one of them is no case.
    """
    if not isinstance(settings.get("sweep"), Mapping) or "base" not in settings.sweep:
        raise ConfigurationError("sweep.base is missing: the sizes that the others start from, as in case")
    sweep = OmegaConf.to_container(settings.sweep)
    base = sweep.pop("base")
    found: dict[Case, dict[str, str]] = {read_case(base, "sweep.base"): {}}
    for factor, values in sweep.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigurationError(f"sweep.{factor}={values} must be a list of values, one at least")
        chosen = [values[0], values[-1]] if settings.scale.name == "smoke" else values
        for value in chosen:
            case = _changed(base, factor, value)
            label = " + ".join(map(str, case.split)) if factor == "split" else str(value)
            found.setdefault(case, {})[factor] = label
    return found


def _changed(base: Mapping, factor: str, value: object) -> Case:
    try:
        return read_case(base | {factor: value}, "sweep.base")
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
