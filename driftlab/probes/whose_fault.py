"""Which of two networks that differ is at fault, where it can be told without asking what was meant."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference, distance, finite_norm
from driftlab.arithmetic.layout import Counted, UsualLayout
from driftlab.arithmetic.locating import BACKWARD
from driftlab.arithmetic.passes import run
from driftlab.blame import unless_ours
from driftlab.finite.decision import Outcome, decided
from driftlab.finite.point import Point
from driftlab.probes.examination import Examination

# Of float64 another order of the sums leaves less, and a kernel that reads the wrong numbers more.
SAME = 1e-6
# A gradient check takes 35 to 133 forward passes of each network, so of one that computes more numbers in a
# pass it is not asked: at most some seconds on a CPU.
DIRECTIONS, LARGEST = 2, 4e6


def told_apart(found: Examination, difference: Difference) -> str:
    """In half a sentence; "" where nothing tells.

    A network that gives what the other does once its numbers lie otherwise in memory runs a wrong kernel. Of
    two gradients of one function that is right which is its derivative, by central differences.
    """
    if not found.float64:
        return ""
    with unless_ours():  # whatever a stranger's network raises when its numbers are moved
        if (role := _by_layout(found, difference.pass_)) is not None:
            return f"; the {role} {_KERNEL}"
        if difference.pass_ in BACKWARD and found.whole.loss is not None and _same_forward(found):
            networks = found.pair.reference, found.pair.candidate
            small = _numbers(found) <= LARGEST
            return _SAYS.get(tuple(_outcome(found, n) for n in networks), "") if small else ""
    return ""


_KERNEL = "gives what the other does once its numbers lie in their usual order in memory: its kernel is wrong"
_BY_DIFFERENCES = "; by finite differences the {}'s gradient is the derivative, and the {}'s is not"
_SAYS = {
    (Outcome.PASS, Outcome.FAIL): _BY_DIFFERENCES.format("reference", "candidate"),
    (Outcome.FAIL, Outcome.PASS): _BY_DIFFERENCES.format("candidate", "reference")
    + ": it stops one on purpose, or is the one that is wrong",
}


def _same_forward(found: Examination) -> bool:
    return not any(d.pass_ == "forward" for d in found.network.wrong())


def _numbers(found: Examination) -> int:
    """That the reference computes in a forward pass."""
    alone = replace(found.whole, loss=None)
    with Counted() as counted:
        run(found.pair.reference, alone, "float64", found.pair.seed, evaluate=False)
    return counted.numbers


def _by_layout(found: Examination, pass_: str) -> str | None:
    """The role of the one that changes, if the two agree where all numbers lie in their usual order."""
    as_they_are = _read(found, pass_)
    with UsualLayout():
        laid_out = _read(found, pass_)
    if _apart(*laid_out) > SAME:
        return None
    both = zip(("reference", "candidate"), as_they_are, laid_out, strict=True)
    changed = [role for role, one, other in both if _apart(one, other) > SAME]
    return changed[0] if len(changed) == 1 else None


def _read(found: Examination, pass_: str) -> list[dict[str, Tensor]]:
    return [read.get(pass_, {}) for read in found.read("float64", evaluate=pass_ == "eval")]


def _apart(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of two tensors of a pass over the largest of its tensors."""
    size = max((finite_norm(t) for t in mine.values()), default=0.0)
    return max((distance(t, theirs[n]) for n, t in mine.items() if n in theirs), default=0.0) / (size or 1.0)


def _outcome(found: Examination, network: nn.Module) -> Outcome:
    def loss(outputs: object) -> Tensor:
        return found.whole.measured(network, outputs, "float64")

    point = Point(network, found.batch[0], loss, found.pair.seed)
    return decided(point, point.gradient(), DIRECTIONS, found.pair.seed)[0]
