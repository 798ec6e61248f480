"""The answer to a gradient check: verdict, tables and figures, from what the seeds measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median

import numpy as np
from omegaconf import DictConfig

from driftlab.finite.prediction import UNITS, advice
from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer
from driftlab.rounding import HALFWAY_BITS
from driftlab.words import Judgement, Verdict
from experiments.gradient_check.figures import figures
from experiments.gradient_check.series import ratios, typical_curvature, typical_derivative
from experiments.gradient_check.tables import literal_table, planted_table, remedy_table, step_table
from suite.showing.wording import Values, each, seeds


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """Right in float64, and off in float32 by no more than rounding -> ``round_off``; wrong -> ``bug``."""
    found = [finding for record in records for finding in record.found()]
    if not found:
        return Judgement(Verdict.INCONCLUSIVE, "no seed has finished: run the same command again", [])
    wrong = [f for f in found if f.evidence.supports is Verdict.BUG]
    silent = [f for f in found if f.evidence.supports is None]
    n = f"({seeds(records)})"
    first = {f.evidence.probe: f.evidence for f in chain(reversed(found), silent, wrong)}
    evidence = list(first.values())
    if wrong:
        return Judgement(Verdict.BUG, f"{wrong[0].evidence.reading} {n}", evidence)
    if silent:
        return Judgement(Verdict.INCONCLUSIVE, f"{silent[0].evidence.reading} {n}", evidence)
    off = max((e.measured for e in evidence if e.probe == "float32_difference"), default=0.0)
    headline = (
        f"the gradient is right; float32 differences are off by {off:.2g} times what truncation and the "
        f"rounding of the loss predict {n}"
    )
    return Judgement(Verdict.ROUND_OFF, headline, evidence)


def answer(settings: DictConfig, values: Values) -> Answer:
    tables = [literal_table(settings, values), step_table(values), remedy_table(values)]
    if any(each(values, "planted")):
        tables.append(planted_table(values))
    return Answer(_sentence(settings, values), tables, figures(settings, values))


def _sentence(settings: DictConfig, values: Values) -> str:
    wrong, right = (ratios(values, dtype) for dtype in ("float32", "float64"))
    loss = median(each(values, "literal", "float64", "loss"))
    typical = advice(loss, typical_derivative(values), typical_curvature(values), settings.case.eps)
    return (
        f"{_check_words(values)} Numeric over autograd's derivative is {_range(right)} in float64 and "
        f"{_range(wrong)} in float32 (middle 90 % of {len(wrong)} points). {typical}"
    )


def _check_words(values: Values) -> str:
    checks = each(values, "check")
    unclear = [check for check in checks if check["outcome"] != "pass"]
    if unclear:
        wrong = f"{unclear[0]['outcome']}, {len(unclear)} of {len(checks)} seeds"
        return f"The gradient itself is not cleared ({wrong}): {unclear[0]['reading']}."
    seen, n = max(check["sees"] for check in checks), len(checks)
    return (
        f"The gradient is right: driftlab.gradient_check would have seen an error of {seen:.1g} of it, in "
        f"{n} of {n} seeds. {_training_words(values)}"
    )


def _training_words(values: Values) -> str:
    """What float32 does to autograd's own gradient, which no difference is part of."""
    off = max(map(_apart, each(values, "literal")))
    if off <= HALFWAY_BITS * UNITS["float32"]:
        return f"Autograd's own in float32 is within {off:.1g} of it: training is not affected."
    return (
        f"Autograd's own in float32 is up to {off:.1g} of it off, more than a few roundings: the network "
        "itself loses digits in float32, and training feels it too."
    )


def _apart(literal: dict) -> float:
    """Of autograd's derivatives in the two dtypes, relative to the largest."""
    wide, narrow = (np.array(literal[dtype]["autograd"]) for dtype in ("float64", "float32"))
    return float(np.abs(narrow - wide).max() / np.abs(wide).max())


def _range(ratios: np.ndarray) -> str:
    low, high = np.quantile(ratios, [0.05, 0.95]) + 0.0  # so that -0 reads 0
    return f"{low:.4g} to {high:.4g}"
