"""The tables of a gradient check: the literal case, the best step, the remedies."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
from omegaconf import DictConfig

from driftlab.finite.prediction import Law
from driftlab.report.sections import Table
from experiments.questions.check.series import (
    Values,
    errors,
    laws,
    points,
    ratios,
    typical_curvature,
    typical_derivative,
)

_EXPECTED = {
    "float32": "0, 0.66, 1.58, 1.75, 4.03: wrong",
    "float64": "0.9993 to 1.0004 (4 points); 0.9966 to 1.001",
}


def literal_table(settings: DictConfig, values: Values) -> Table:
    rows = [_literal_row(settings, values, dtype) for dtype in ("float32", "float64")]
    columns = {
        "dtype": "dtype",
        "points": "points (n)",
        "loss": "loss (median over seeds)",
        "quantum": "spacing of the loss / eps (absolute)",
        "low": "ratio, 5 %",
        "middle": "ratio, median",
        "high": "ratio, 95 %",
        "least": "ratio, least",
        "most": "ratio, greatest",
        "within": "points within 1 % (%)",
        "error": "|numeric - autograd| (absolute, median)",
        "law": "predicted (absolute)",
        "expected": "expected ratios (thread, issue)",
    }
    title = "Numeric over autograd's derivative, one-sided"
    if _as_asked(settings):
        title = "The thread's check: numeric over autograd's derivative"
    else:
        columns.pop("expected")
    return Table("literal", title, columns, rows, _literal_words(settings, values, *rows))


def _as_asked(settings: DictConfig) -> bool:
    """Whether it is the case of the thread, of which there are numbers to expect."""
    case = settings.case
    literal = {"rows": 140, "columns": 120, "reduction": "sum"}
    return (
        case.target.endswith("check.case.halved")
        and case.eps == 1e-3
        and {
            "reduction": "sum",
            **(case.options or {}),
        }
        == literal
    )


def _literal_row(settings: DictConfig, values: Values, dtype: str) -> dict:
    numeric, autograd = points(values, dtype)
    quotients = ratios(values, dtype)
    of_seeds = [v["literal"][dtype] for v in values.values()]
    loss = median(s["loss"] for s in of_seeds)
    shares = {"least": 0, "low": 0.05, "middle": 0.5, "high": 0.95, "most": 1}
    quotient = {key: float(np.quantile(quotients, share)) for key, share in shares.items()}
    return {
        "dtype": dtype,
        "points": len(numeric),
        "loss": loss,
        "quantum": median(s["quantum"] for s in of_seeds),
        **{key: f"{value + 0.0:.4f}" for key, value in quotient.items()},  # so that -0 reads 0
        "within": float(100 * np.mean(np.abs(quotients - 1) <= 0.01)),
        "error": float(np.median(np.abs(numeric - autograd))),
        "law": Law(loss, typical_curvature(values), dtype).error(settings.case.eps),
        **({"expected": _EXPECTED[dtype]} if _as_asked(settings) else {}),
    }


def _literal_words(settings: DictConfig, values: Values, narrow: dict, wide: dict) -> str:
    gap, share = narrow["quantum"], narrow["quantum"] / typical_derivative(values)
    coarse = ", whatever the true one is" if share > 0.1 else f" ({share:.1g} of a typical one)"
    small = (
        "; it shows as a ratio far from 1 only where the derivative itself is small" if _even(values) else ""
    )
    stairs = (
        f"In float32 the loss can only take values {gap * settings.case.eps:.2g} apart, so a numeric "
        f"derivative is a multiple of {gap:.3g}{coarse}"
    )
    return (
        f"{stairs if gap else 'In float32 the loss, 0, has all its digits'}: {narrow['within']:.3g} % of the "
        f"points come within 1 %. In float64 {wide['within']:.3g} % do; what is left there is "
        f"{wide['error']:.2g} (absolute, median; truncation and round-off predict {wide['law']:.2g}){small}."
    )


def _even(values: Values) -> bool:
    """Whether float64 is off by much the same everywhere: by a factor of 2 over the middle 90 % of points."""
    numeric, autograd = points(values, "float64")
    low, high = np.quantile(np.abs(numeric - autograd), [0.05, 0.95])
    return high <= 2 * low


def step_table(values: Values) -> Table:
    rows = [_step_row(values, dtype, sides) for dtype in ("float32", "float64") for sides in (1, 2)]
    columns = {
        "dtype": "dtype",
        "difference": "difference",
        "predicted": "best eps, predicted",
        "best": "best eps, measured",
        "predicted_error": "error there, predicted (% of the derivative)",
        "error": "error there, measured (% of the derivative)",
    }
    narrow, wide = rows[0], rows[2]
    conclusion = (
        f"One-sided in float32, no eps tried leaves less than {narrow['error']:.2g} % of a typical "
        f"derivative; in float64 eps = {wide['best']:.1g} leaves {wide['error']:.1g} %. A smaller eps has "
        "less truncation and more round-off, u |L| / eps: the best eps is where they cross. The law counts "
        "one rounding of the loss at its largest; a median over points is mostly below."
    )
    return Table("steps", "The best step, predicted and measured", columns, rows, conclusion)


def _step_row(values: Values, dtype: str, sides: int) -> dict:
    steps = np.array(next(iter(values.values()))["curve"]["steps"])
    derivative = typical_derivative(values)
    law, measured = laws(values, dtype, sides), errors(values, dtype, sides)
    best = int(np.nanargmin(measured))
    return {
        "dtype": dtype,
        "difference": "one-sided" if sides == 1 else "central",
        "predicted": f"{law.best_step:.3g}" if math.isfinite(law.best_step) else "the larger the better",
        "best": float(steps[best]),
        "predicted_error": 100 * law.error(min(law.best_step, steps[0])) / derivative,
        "error": float(100 * measured[best] / derivative),
    }
