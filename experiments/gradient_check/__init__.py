"""The kind of experiment that asks why a finite-difference gradient check is wrong in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from driftlab.finite.decision import Outcome
from driftlab.finite.differences import LIMIT
from driftlab.finite.prediction import Law
from driftlab.gradients import GradientCheck, gradient_check
from driftlab.process import random_state_kept
from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import HALFWAY_BITS
from driftlab.words import DiagnoseError, Evidence, Finding, Verdict
from experiments.gradient_check.answer import answer, judged
from experiments.gradient_check.case import Case, build_case
from experiments.gradient_check.faults import PLANTED, compared, warm_up
from experiments.gradient_check.measures import Elements, curve, drawn_indices, literal, middle, remedies
from suite.command.errors import ConfigurationError, one_line
from suite.command.idle_rules import TakenAs
from suite.command.schema import Function, Positive, Shared, group, whole
from suite.command.seeds import parse_seeds
from suite.running.asking import Measured, Question


class Settings(Shared):
    """What is set for this kind."""

    idle = (
        TakenAs("case.points", lambda s: _points(s), "scale=smoke takes no more"),
        TakenAs("case.points", lambda s: _elements_if_fewer(s), "the case has no more elements"),
        TakenAs("curve.points", lambda s: min(s.curve.points, _drawn(s)), "the case has no more points"),
    )

    case: group(target=Function, options=dict[str, Any] | None, eps=Positive, points=whole(1))
    curve: group(largest=Positive, decades=whole(1), per_decade=whole(1), points=whole(1))
    faults: bool


def measure(settings: DictConfig, seed: int) -> Measured:
    """Raises ConfigurationError as ``check`` does."""
    device, case, indices, (wide, narrow) = check(settings, seed)
    few = indices[: settings.curve.points]
    on_curve = (Elements(case, dtype, device, few) for dtype in ("float64", "float32"))
    planted = PLANTED[:: 4 if _smoke(settings) else 1] if settings.faults else ()
    if planted:
        warm_up()
    checked = _checked(case, device, seed)
    found = literal(wide, narrow, settings.case.eps)
    values = {
        "literal": found,
        "remedies": remedies(wide, narrow, settings.case.eps),
        "curve": curve(*on_curve, settings.curve),
        "check": {"outcome": str(checked.outcome), "reading": checked.reading, "sees": checked.sees},
        "planted": [compared(p, seed, device) for p in planted],
    }
    probes = [f.as_dict() for f in (_right(checked), _explained(found, settings.case.eps))]
    return Measured(SeedRecord(seed, [], [], {"arms": {}, "probes": probes}), values)


def check(settings: DictConfig, seed: int) -> tuple[torch.device, Case, list[int], tuple[Elements, Elements]]:
    """The case on its device, its points, and its elements in float64 and float32.

    Raises:
        ConfigurationError: it cannot be differentiated.
    """
    device, case = torch.device(settings.device), build_case(settings, seed)
    indices = drawn_indices(seed, case.inputs.numel(), _points(settings))
    wide, narrow = (Elements(case, dtype, device, indices) for dtype in ("float64", "float32"))
    for elements in (wide, narrow):
        _try(settings, elements)
    return device, case, indices, (wide, narrow)


def _smoke(settings: DictConfig) -> bool:
    return settings.scale.name == "smoke"


def _points(settings: DictConfig) -> int:
    return min(settings.case.points, 10) if _smoke(settings) else settings.case.points


def _drawn(settings: DictConfig) -> int:
    """How many points there are, of which there may be no more than elements."""
    with random_state_kept():
        case = build_case(settings, parse_seeds(settings.seed)[0])
    return min(_points(settings), case.inputs.numel())


def _elements_if_fewer(settings: DictConfig) -> int:
    drawn = _drawn(settings)
    return drawn if drawn < _points(settings) else settings.case.points


def _try(settings: DictConfig, elements: Elements) -> None:
    """Raises ConfigurationError where the case cannot be differentiated, or is another one each time."""
    where = f"case.target={settings.case.target}, in {elements.dtype}"
    try:
        losses = [elements.loss() for _ in range(2)]
        if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses):
            raise TypeError("loss(outputs) is not one number: sum or average it")
        derivatives, numeric = elements.gradient(), elements.one_sided(settings.case.eps)
    except Exception as error:  # whatever a stranger's network raises
        raise ConfigurationError(f"{where}: {one_line(error)}") from None
    if not all(math.isfinite(v) for v in (*map(float, losses), *derivatives)):
        raise ConfigurationError(f"{where}: the loss or its gradient is not finite; draw other inputs")
    if float(losses[0]) != float(losses[1]):
        raise ConfigurationError(f"{where}: the loss changes from call to call; use eval mode, no dropout")
    if not any(derivatives):
        raise ConfigurationError(f"{where}: the derivative is 0 at every point; draw other inputs")
    if not any(math.isfinite(n) for n, d in zip(numeric, derivatives, strict=True) if d):
        raise ConfigurationError(
            f"{where}: no difference is finite at case.eps={settings.case.eps:g}; try 1e-3"
        )


def _checked(case: Case, device: torch.device, seed: int) -> GradientCheck:
    loss = case.loss.to(device) if isinstance(case.loss, torch.nn.Module) else case.loss
    try:
        return gradient_check(case.module.to(device), case.inputs.to(device), loss, seed=seed)
    except DiagnoseError as error:
        raise ConfigurationError(f"case.target: {error}") from None


_SUPPORTS = {Outcome.PASS: Verdict.ROUND_OFF, Outcome.FAIL: Verdict.BUG, Outcome.UNDECIDED: None}


def _right(checked: GradientCheck) -> Finding:
    worst = max((d.ratio for d in checked.differences), default=None)
    question = "Is autograd's gradient the derivative of the loss, in float64?"
    supports = _SUPPORTS[checked.outcome]
    return Finding(Evidence("gradient_check", question, worst, LIMIT, supports, checked.reading))


def _explained(found: dict, eps: float) -> Finding:
    """Whether what float32 is off by is of the size that the rounding of the loss predicts."""
    narrow = found["float32"]
    law = Law(narrow["loss"], middle(found["curvature"]), "float32").error(eps)
    pairs = zip(narrow["numeric"], narrow["autograd"], strict=True)
    share = middle([abs(n - g) for n, g in pairs]) / law if law else 0.0
    explained = share <= HALFWAY_BITS
    reading = (
        f"float32 differences are off by {share:.2g} times what truncation and the rounding of the loss "
        f"predict, {law:.2g} (absolute; median over points)"
    )
    question = "Are float32 differences off by no more than truncation and the rounding of the loss?"
    supports = Verdict.ROUND_OFF if explained else None
    return Finding(Evidence("float32_difference", question, share, HALFWAY_BITS, supports, reading))


def about(settings: DictConfig) -> str:
    case = settings.case
    name = case.target.rpartition(".")[2]
    return f"{name}: one-sided differences with eps {case.eps:g} at {_points(settings)} points"


QUESTION = Question(measure=measure, answer=answer, about=about, check=check, judge=judged)
run = QUESTION.run
