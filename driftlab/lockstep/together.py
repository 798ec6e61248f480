"""Several candidates beside one reference: a lockstep each, the reference and its controls in all of them.

The first steps every arm of its own; each of the others steps its candidate alone and takes what was seen of
the rest from the first. Each holds the rows that it would hold by itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftlab.lockstep.arm import Arm
from driftlab.lockstep.loop import Lockstep


class Together:
    """Locksteps that step as one. All but the first were made ``beside`` it."""

    def __init__(self, locksteps: Sequence[Lockstep]):
        self.locksteps = list(locksteps)

    @property
    def arms(self) -> list[Arm]:
        """Each once."""
        return list({id(arm): arm for each in self.locksteps for arm in each.arms}.values())

    @property
    def steps(self) -> int:
        return max(each.steps for each in self.locksteps)

    def forward_backward(self, step: int, inputs: object, targets: object) -> None:
        for each in self.locksteps:
            each.forward_backward(step, inputs, targets)

    def update(self, step: int) -> None:
        for each in self.locksteps:
            each.update(step)

    def flush(self) -> None:
        for each in self.locksteps:
            each.flush()


def sharing(first: Lockstep, other: Lockstep) -> Lockstep:
    """``other`` with the arms of ``first`` but for its candidate's, to be stepped after it.

    Args:
        first, other: of the same reference and settings, at the same step.
    """
    known = {arm.name: arm for arm in first.arms if arm.role != "candidate"}
    arms = [known.get(arm.name, arm) for arm in other.arms]
    for arm in arms:
        if arm.role == "candidate":
            arm.against = known[arm.against.name]
    by = {"seed": other.seed, "logged": other.logged, "call": other.call, "outputs": other.outputs}
    return Lockstep(arms, other.loss, **by, beside=first)
