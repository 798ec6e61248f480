"""How people tell a right rewrite from a wrong one, driftlab's verdict, and how often each is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from driftlab.verdict.statistics import clopper_pearson
from driftlab.words import Verdict
from experiments.loss_curves_do_not_tell import series
from experiments.loss_curves_do_not_tell.networks import NETWORKS
from suite.showing.wording import Values

LOSS_TOLERANCE = 0.01  # relative: "the final loss agrees within 1 %"
ACCURACY_TOLERANCE = 0.01  # one point, about what papers report an accuracy to
# Who runs both once more in float64 looks whether the same numbers are printed. Keras's progress bar prints
# four decimals of a loss, PyTorch's CIFAR-10 tutorial three, its MNIST example six: so the middle one.
PRINTED_DECIMALS = 4
OTHER_DECIMALS = (3, 6)
_SAYS = {Verdict.ROUND_OFF: True, Verdict.BIT_IDENTICAL: True, Verdict.BUG: False}

Same = Callable[[series.Seed, str], bool | None]


class Rule(NamedTuple):
    """A rule: ``same(seed, role)`` says whether it takes a network for the same function; None: neither."""

    key: str
    words: str
    same: Same


def _within(tolerance: float, off: series.Of) -> Same:
    """What is no number agrees with nothing."""

    def same(seed: series.Seed, role: str) -> bool:
        # a difference of exactly one point must not fall out by the rounding of a subtraction
        return (found := off(seed, role)) is not None and abs(found) <= tolerance * (1 + 1e-9)

    return same


def _printed_alike(decimals: int) -> Same:
    """The final losses in float64."""

    def same(seed: series.Seed, role: str) -> bool:
        losses = [series.last(seed, "loss", r, "float64") for r in (role, series.REFERENCE)]
        return None not in losses and len({f"{loss:.{decimals}f}" for loss in losses}) == 1

    return same


_LOSS = f"within {100 * LOSS_TOLERANCE:g} %"
HABITS = (
    Rule("final_loss", f"final training loss {_LOSS}", _within(LOSS_TOLERANCE, series.loss_off)),
    Rule(
        "tail_loss",
        f"mean loss of the last tenth of steps {_LOSS}",
        _within(LOSS_TOLERANCE, series.tail_loss_off),
    ),
    Rule(
        "accuracy",
        f"test accuracy within {100 * ACCURACY_TOLERANCE:g} point",
        _within(ACCURACY_TOLERANCE, series.accuracy_off),
    ),
    Rule(
        "allclose",
        "torch.allclose of all weights after one update",
        lambda seed, role: seed["allclose"][role],
    ),
    Rule(
        "double",
        f"rerun in float64: final loss equal to {PRINTED_DECIMALS} decimals",
        _printed_alike(PRINTED_DECIMALS),
    ),
    Rule(
        "output_mean",
        "torch.isclose of the mean of the first outputs",
        lambda seed, role: seed["output_mean"][role]["close"],
    ),
)
FEWER_AND_MORE = tuple(Rule(f"double_{d}", f"with {d} decimals", _printed_alike(d)) for d in OTHER_DECIMALS)
DRIFTLAB = Rule(
    "driftlab",
    "driftlab's verdict",
    lambda seed, role: _SAYS.get(Verdict(seed["verdicts"][role]["verdict"])),
)


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


def score(values: Values, rule: Rule) -> Score:
    said = [(n.same, rule.same(seed, n.role)) for seed in values.values() for n in NETWORKS]
    right = [answer is True for same, answer in said if same]
    wrong = [answer is False for same, answer in said if not same]
    return Score(rule, right.count(False), len(right), wrong.count(False), len(wrong))
