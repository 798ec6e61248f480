"""Finite differences of a case, element by element: what they give, and what they should."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from omegaconf import DictConfig
from torch import Tensor

from driftlab.finite.prediction import UNITS, Law, spacing
from driftlab.precision import PRECISIONS
from experiments.gradient_check.case import Against, Case

# Steps at which float64 gives second and third derivatives to more digits than the laws need, in units of
# the inputs' typical size.
SECOND_STEP, THIRD_STEP = 1e-3, 5e-2


AS_IT_IS, AVERAGED = "the loss as it is", "the loss divided by the number of inputs (averaged)"


@dataclass(frozen=True)
class Elements:
    """A case in one dtype on a device, and the elements of its input that are moved, by flat index."""

    case: Case
    dtype: str
    device: torch.device
    indices: Sequence[int]

    def __post_init__(self) -> None:
        to = {"device": self.device, "dtype": PRECISIONS[self.dtype].dtype}
        loss = copy.deepcopy(self.case.loss)
        own = Case(
            copy.deepcopy(self.case.module).to(**to),
            self.case.inputs.to(**to),
            loss.to(**to) if isinstance(loss, torch.nn.Module) else loss,
        )
        object.__setattr__(self, "case", own)

    @torch.no_grad()
    def loss(self, index: int | None = None, step: float = 0.0, of: Callable | None = None) -> Tensor:
        """With one element moved; ``of`` takes the place of the case's own loss."""
        inputs = self.case.inputs.clone()
        if index is not None:
            inputs.view(-1)[index] += step
        return (of or self.case.loss)(self.case.module(inputs))

    def gradient(self) -> list[float]:
        """Autograd's, at the indices."""
        inputs = self.case.inputs.clone().requires_grad_()
        self.case.loss(self.case.module(inputs.clone())).backward()  # it may write into what it is given
        return inputs.grad.view(-1)[list(self.indices)].double().tolist()

    def one_sided(self, step: float, of: Callable | None = None) -> list[float]:
        """The thread's: (L(x + eps) - L(x)) / eps, in the arithmetic of the dtype."""
        start = self.loss(of=of)
        return [float((self.loss(i, step, of) - start).sum() / step) for i in self.indices]

    def central(self, step: float) -> list[float]:
        return [float((self.loss(i, step) - self.loss(i, -step)) / (2 * step)) for i in self.indices]

    @property
    def unit(self) -> float:
        """The power of two next to the typical size of the inputs; 1 where they are zero."""
        typical = float(self.case.inputs.double().square().mean().sqrt())
        return 2.0 ** round(math.log2(typical)) if typical and math.isfinite(typical) else 1.0

    def second(self) -> list[float]:
        """|L''| by each element; 0 where it is too small to be told from rounding."""
        h, start = SECOND_STEP * self.unit, float(self.loss())
        ends = ((float(self.loss(i, h)), float(self.loss(i, -h))) for i in self.indices)
        return [_resolved(abs(a + b - 2 * start) / h**2, start, h**2) for a, b in ends]

    def third(self) -> list[float]:
        """|L'''| by each element; 0 where it is too small to be told from rounding."""
        h = THIRD_STEP * self.unit
        at = [[float(self.loss(i, k * h)) for k in (2, 1, -1, -2)] for i in self.indices]
        return [_resolved(abs(a - 2 * b + 2 * c - d) / (2 * h**3), b, h**3) for a, b, c, d in at]


def _resolved(derivative: float, loss: float, step: float) -> float:
    return 0.0 if derivative <= 64 * UNITS["float64"] * abs(loss) / step else derivative


def literal(wide: Elements, narrow: Elements, step: float) -> dict:
    """Autograd's and the numeric derivative of every point in both dtypes, and how coarse the loss is."""
    found = {"curvature": wide.second()}
    for elements in (wide, narrow):
        loss = float(elements.loss())
        found[elements.dtype] = {
            "loss": loss,
            "quantum": spacing(loss, elements.dtype) / step,
            "autograd": elements.gradient(),
            "numeric": elements.one_sided(step),
        }
    return found


def remedies(wide: Elements, narrow: Elements, step: float) -> list[dict]:
    """What can be done about float32, and what it leaves: the median relative error over the points."""
    truth, loss = wide.gradient(), float(wide.loss())
    best = Law(loss, middle(wide.second()), "float32").best_step
    count = narrow.case.inputs.numel()
    averaged = narrow.one_sided(step, lambda out: narrow.case.loss(out) / count)
    wide_loss = wide.case.loss
    rows = [
        (AS_IT_IS, "float32", step, narrow.one_sided(step)),
        (AVERAGED, "float32", step, [count * d for d in averaged]),
        ("central difference", "float32", step, narrow.central(step)),
        (
            "loss computed in float64, network in float32",
            "float32",
            step,
            narrow.one_sided(step, wide_loss_of(wide_loss)),
        ),
        ("everything in float64", "float64", step, wide.one_sided(step)),
        ("central difference in float64", "float64", step, wide.central(step)),
    ]
    if best and math.isfinite(best):
        rows.insert(3, ("the best eps of the law", "float32", best, narrow.one_sided(best)))
    terms = _terms(narrow.case.loss)
    if terms is not None:
        rows.insert(
            3, ("terms subtracted before they are summed", "float32", step, narrow.one_sided(step, terms))
        )
    return [
        {"what": what, "dtype": dtype, "eps": eps, "error": _relative(numeric, truth)}
        for what, dtype, eps, numeric in rows
    ]


def wide_loss_of(loss: Callable) -> Callable:
    return lambda outputs: loss(outputs.double())


def _terms(loss: Callable) -> Callable | None:
    """The loss before it is summed, where it is one of torch's that can say it."""
    if not isinstance(loss, Against) or getattr(loss.criterion, "reduction", None) != "sum":
        return None
    terms = copy.deepcopy(loss)
    terms.criterion.reduction = "none"
    return terms


def _relative(numeric: Sequence[float], truth: Sequence[float]) -> float:
    return middle([abs(n - t) / abs(t) for n, t in zip(numeric, truth, strict=True) if t])


def middle(values: Sequence[float]) -> float:
    """The median of those that are finite: some steps leave the domain of a loss. NaN where none is."""
    finite = [v for v in values if math.isfinite(v)]
    return median(finite) if finite else math.nan


def curve(wide: Elements, narrow: Elements, settings: DictConfig) -> dict:
    """The absolute error of both differences against eps in both dtypes: medians over the points."""
    count = settings.decades * settings.per_decade
    steps = [settings.largest * 10 ** (-k / settings.per_decade) for k in range(count + 1)]
    truth = wide.gradient()
    found = {
        "steps": steps,
        "loss": float(wide.loss()),
        "derivative": middle([abs(t) for t in truth]),
        "second": middle(wide.second()),
        "third": middle(wide.third()),
        "errors": {},
    }
    for elements in (narrow, wide):
        for sides, differ in ((1, elements.one_sided), (2, elements.central)):
            errors = [middle([abs(n - t) for n, t in zip(differ(h), truth, strict=True)]) for h in steps]
            found["errors"][f"{elements.dtype}.{sides}"] = errors
    return found


def drawn_indices(seed: int, numel: int, count: int) -> list[int]:
    """As many different elements as there are, at most ``count``."""
    return random.Random(seed).sample(range(numel), min(count, numel))
