"""How people tell a right rewrite from a wrong one, driftlab's verdict, and how often each is right."""

from __future__ import annotations

from collections.abc import Callable

from bench import habits
from bench.habits import LOSS_TOLERANCE, PRINTED_DECIMALS, Rule, Score, printed_alike, within
from driftlab.words import Verdict
from experiments.loss_curves_do_not_tell import series
from experiments.loss_curves_do_not_tell.networks import NETWORKS
from suite.showing.wording import Values

ACCURACY_TOLERANCE = 0.01  # one point, about what papers report an accuracy to
OTHER_DECIMALS = (3, 6)
_SAYS = {Verdict.ROUND_OFF: True, Verdict.BIT_IDENTICAL: True, Verdict.BUG: False}

Same = Callable[[series.Seed, str], bool | None]


def _within(tolerance: float, off: series.Of) -> Same:
    return lambda seed, role: within(off(seed, role), tolerance)


def _printed_alike(decimals: int) -> Same:
    """The final losses in float64."""
    return lambda seed, role: printed_alike(
        [series.last(seed, "loss", r, "float64") for r in (role, series.REFERENCE)], decimals
    )


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


def score(values: Values, rule: Rule) -> Score:
    said = [(n.same, rule.same(seed, n.role)) for seed in values.values() for n in NETWORKS]
    return habits.score(rule, said)
