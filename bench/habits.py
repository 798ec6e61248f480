"""Rules of thumb that tell a right rewrite from a wrong one, and how often a rule is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from driftlab.lockstep.arm import Arm
from driftlab.verdict.statistics import clopper_pearson

LOSS_TOLERANCE = 0.01  # relative: "the loss agrees within 1 %"
# Who runs both once more in float64 looks whether the same numbers are printed. Keras's progress bar prints
# four decimals of a loss, PyTorch's CIFAR-10 tutorial three, its MNIST example six: so the middle one.
PRINTED_DECIMALS = 4


class Rule(NamedTuple):
    """A rule: ``same(...)`` says whether it takes a network for the same function; None: neither."""

    key: str
    words: str
    same: Callable[..., bool | None]


class Score(NamedTuple):
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


def score(rule: Rule, said: Iterable[tuple[bool, bool | None]]) -> Score:
    """Of pairs: whether the network is the same function, and what the rule said of it."""
    said = list(said)
    right = [answer is True for same, answer in said if same]
    wrong = [answer is False for same, answer in said if not same]
    return Score(rule, right.count(False), len(right), wrong.count(False), len(wrong))


def within(off: float | None, tolerance: float) -> bool:
    """What is no number agrees with nothing."""
    # a difference of exactly one point must not fall out by the rounding of a subtraction
    return off is not None and abs(off) <= tolerance * (1 + 1e-9)


def printed_alike(losses: Sequence[float | None], decimals: int = PRINTED_DECIMALS) -> bool:
    """Whether all of them print the same; what is no number prints nothing."""
    return None not in losses and len({f"{loss:.{decimals}f}" for loss in losses}) == 1


@torch.no_grad()
def all_close(arm: Arm) -> bool:
    """torch.allclose with its defaults, of each folded weight and that of the arm's against."""
    folded, theirs = arm.fold(arm.parameters), arm.against.parameters
    return all(n in folded and torch.allclose(folded[n], p) for n, p in theirs.items())
