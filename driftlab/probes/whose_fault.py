"""Which of two networks that differ is at fault, where it can be told without asking what was meant."""

from __future__ import annotations

from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference, distance, finite_norm
from driftlab.arithmetic.layout import UsualLayout
from driftlab.arithmetic.locating import BACKWARD
from driftlab.arithmetic.passes import run
from driftlab.blame import unless_ours
from driftlab.finite.decision import Outcome, decided
from driftlab.finite.point import Point
from driftlab.probes.examination import Examination

# Of float64 another order of the sums leaves less, and a kernel that reads the wrong numbers more.
SAME = 1e-6
DIRECTIONS = 2
_DRAWS = "drop"


def told_apart(found: Examination, difference: Difference) -> str:
    """In half a sentence; "" where nothing tells.

    A network that gives something else when its numbers lie otherwise in memory runs a wrong kernel. Of two
    gradients of one function that is right which is its derivative, by central differences.
    """
    networks = {"reference": found.pair.reference, "candidate": found.pair.candidate}
    if not found.float64:
        return ""
    with unless_ours():  # whatever a stranger's network raises when its numbers are moved
        for role, network in networks.items():
            if _by_layout(found, network, difference.pass_):
                return f"; the {role} {_KERNEL}"
        if _same_forward(found) and difference.pass_ in BACKWARD and found.whole.loss is not None:
            said = tuple(_outcome(found, network) for network in networks.values())
            return _SAYS.get(said, "")
    return ""


_KERNEL = (
    "itself gives something else where the same numbers lie in memory in their usual order: it runs a kernel "
    "that is wrong there"
)
_BY_DIFFERENCES = "; by finite differences the {}'s gradient is the derivative, and the {}'s is not"
_SAYS = {
    (Outcome.PASS, Outcome.FAIL): _BY_DIFFERENCES.format("reference", "candidate"),
    (Outcome.FAIL, Outcome.PASS): _BY_DIFFERENCES.format("candidate", "reference")
    + ": it stops one on purpose, or is the one that is wrong",
}


def _same_forward(found: Examination) -> bool:
    return not any(d.pass_ == "forward" for d in found.network.wrong())


def _by_layout(found: Examination, network: nn.Module, pass_: str) -> bool:
    """Whether what a pass gives depends on how its numbers lie; not where what is drawn does."""

    def passes() -> dict[str, dict[str, Tensor]]:
        return run(network, found.whole, "float64", found.pair.seed, evaluate=pass_ == "eval").tensors

    as_it_is = passes()
    with UsualLayout():
        laid_out = passes()
    if pass_ in BACKWARD and _apart(as_it_is, laid_out, "forward") > SAME:
        return False
    return _apart(as_it_is, laid_out, pass_) > SAME and not _draws(network)


def _apart(mine: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]], pass_: str) -> float:
    """The largest distance of two tensors of a pass over the largest of its tensors."""
    own, theirs = mine.get(pass_, {}), other.get(pass_, {})
    size = max((finite_norm(t) for t in own.values()), default=0.0)
    return max((distance(t, theirs[n]) for n, t in own.items() if n in theirs), default=0.0) / (size or 1.0)


def _draws(network: nn.Module) -> bool:
    """Whether a layer draws random numbers, which may come in the order of the memory."""
    return network.training and any(_DRAWS in type(module).__name__.lower() for module in network.modules())


def _outcome(found: Examination, network: nn.Module) -> Outcome:
    def loss(outputs: object) -> Tensor:
        return found.whole.measured(network, outputs, "float64")

    point = Point(network, found.batch[0], loss, found.pair.seed)
    return decided(point, point.gradient(), DIRECTIONS, found.pair.seed)[0]
