"""How people tell a right rewrite from a wrong one, driftlab's verdict, and how often each is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from driftlab.statistics import clopper_pearson
from driftlab.verdict import Verdict
from experiments.questions.loss_curves.networks import NETWORKS
from experiments.questions.loss_curves.series import (
    REFERENCE,
    Seed,
    Values,
    accuracy_off,
    last,
    loss_off,
    relative,
    tail_loss,
)

LOSS_TOLERANCE = 0.01  # relative: "the final loss agrees within 1 %"
ACCURACY_TOLERANCE = 0.01  # one point, about what papers report an accuracy to
# Who runs both once more in float64 looks whether the same numbers are printed. Keras's progress bar prints
# four decimals of a loss, PyTorch's CIFAR-10 tutorial three, its MNIST example six: so the middle one.
PRINTED_DECIMALS = 4
OTHER_DECIMALS = (3, 6)
_SAYS = {Verdict.ROUND_OFF: True, Verdict.BIT_IDENTICAL: True, Verdict.BUG: False}


def by_final_loss(seed: Seed, role: str) -> bool:
    return _within(loss_off(seed, role), LOSS_TOLERANCE)


def by_tail_loss(seed: Seed, role: str) -> bool:
    return _within(relative(tail_loss(seed, role), tail_loss(seed, REFERENCE)), LOSS_TOLERANCE)


def by_accuracy(seed: Seed, role: str) -> bool:
    return _within(accuracy_off(seed, role), ACCURACY_TOLERANCE)


def by_all_close(seed: Seed, role: str) -> bool:
    return seed["allclose"][role]


def by_double(seed: Seed, role: str, decimals: int = PRINTED_DECIMALS) -> bool:
    losses = [last(seed, "loss", r, "float64") for r in (role, REFERENCE)]
    if None in losses:
        return False
    mine, theirs = (f"{loss:.{decimals}f}" for loss in losses)
    return mine == theirs


def by_output_mean(seed: Seed, role: str) -> bool:
    return seed["output_mean"][role]["close"]


def by_driftlab(seed: Seed, role: str) -> bool | None:
    return _SAYS.get(Verdict(seed["verdicts"][role]["verdict"]))


def _within(off: float | None, tolerance: float) -> bool:
    """What is no number agrees with nothing."""
    # a difference of exactly one point must not fall out by the rounding of a subtraction
    return off is not None and abs(off) <= tolerance * (1 + 1e-9)


@dataclass(frozen=True)
class Rule:
    """A rule: ``same(seed, role)`` says whether it takes a network for the same function; None: neither."""

    key: str
    words: str
    same: Callable[[Seed, str], bool | None]


HABITS = (
    Rule("final_loss", f"final training loss within {100 * LOSS_TOLERANCE:g} %", by_final_loss),
    Rule(
        "tail_loss", f"mean loss of the last tenth of steps within {100 * LOSS_TOLERANCE:g} %", by_tail_loss
    ),
    Rule("accuracy", f"test accuracy within {100 * ACCURACY_TOLERANCE:g} point", by_accuracy),
    Rule("allclose", "torch.allclose of all weights after one update", by_all_close),
    Rule("double", f"rerun in float64: final loss equal to {PRINTED_DECIMALS} decimals", by_double),
    Rule("output_mean", "torch.isclose of the mean of the first outputs", by_output_mean),
)
FEWER_AND_MORE = tuple(
    Rule(f"double_{d}", f"with {d} decimals", partial(by_double, decimals=d)) for d in OTHER_DECIMALS
)
DRIFTLAB = Rule("driftlab", "driftlab's verdict", by_driftlab)


@dataclass(frozen=True)
class Score:
    """How often a rule was right about ``n`` networks.

    Attributes:
        alarms: right networks that it did not clear, of ``same``.
        missed: wrong networks that it did not catch, of ``wrong``.
    """

    rule: Rule
    alarms: int
    same: int
    missed: int
    wrong: int

    @property
    def n(self) -> int:
        return self.same + self.wrong

    @property
    def right(self) -> int:
        return self.n - self.alarms - self.missed

    @property
    def interval(self) -> tuple[float, float]:
        return clopper_pearson(self.right, self.n)


def score(values: Values, rule: Rule) -> Score:
    said = [(n.same, rule.same(seed, n.role)) for seed in values.values() for n in NETWORKS]
    right = [answer is True for same, answer in said if same]
    wrong = [answer is False for same, answer in said if not same]
    return Score(rule, right.count(False), len(right), wrong.count(False), len(wrong))
