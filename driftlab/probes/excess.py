"""Where a pair leaves its controls: is it a module, the update before it, or rounding carried on?"""

from __future__ import annotations

import math

from driftlab.arithmetic.naming import LOSS
from driftlab.lockstep.window import Snapshots
from driftlab.probes.later import examination_at, first_wrong, locate
from driftlab.probes.probe import Probe
from driftlab.rounding import HALFWAY_BITS, UNIT_ROUND_OFF
from driftlab.words import EXCESS, Excess, Finding, Verdict


def ask_excess(snapshots: Snapshots, excess: Excess) -> list[Finding]:
    """Both networks on the same weights and the batch of the step at which the pair left its controls."""
    seldom_looked_at = excess.kind in ("buffer_distance", "eval_logit_distance")
    step = first_wrong(snapshots, excess.step) if seldom_looked_at else excess.step
    if found := locate(snapshots, step):
        return found
    allowed = excess.allowed
    if not excess.carried:
        says = (
            f"they do not, at step {excess.step}; but the weights are no further apart than in the controls, "
            "and rounding cannot have come from there: something else is kept from step to step"
        )
        return [PROBE.finding(None, None, says)]
    if excess.moved:
        leave = "weights leave what the controls show"
        says = f"{{place}}: {leave}, and on equal weights both agree: the update parts them"
        place = snapshots.moved_apart(excess.step)
        return [PROBE.finding(excess.measured, Verdict.BUG, says, place, threshold=allowed)]
    if not examination_at(snapshots, step).network.exact:
        return [PROBE.not_applicable("the reference runs in float32 alone, in which a look tells no more")]
    if not _looked_at(snapshots, excess):
        says = (
            "what parts them before any update does not show where both are looked at by themselves: it is "
            "no rounding that a training carried on"
        )
        return [PROBE.finding(excess.measured, None, says, threshold=allowed)]
    says = f"they do not, at step {excess.step}: what is seen there is rounding, carried on by the training"
    return [PROBE.finding(0.0, Verdict.ROUND_OFF, says, threshold=allowed)]


# The curves that both a window and a look on the spot measure, with what they are called there.
_SEEN_BY_BOTH = {
    "logit_distance": "forward",
    "gradient_distance": "weight gradient",
    "eval_logit_distance": "eval",
}


def _looked_at(snapshots: Snapshots, excess: Excess) -> bool:
    """Whether the look on the spot saw in float64 what the curves measured before any update.

    No training has carried anything on by then, on the same weights, batch and arithmetic: the same numbers
    come again, but for rounding. What does not come again (an output that is compared in one of the two
    alone, a state that an earlier call left) was not looked at, and is not cleared.
    """
    if excess.step or excess.kind not in _SEEN_BY_BOTH or math.isnan(excess.measured):
        return True
    network = examination_at(snapshots, 0).network
    if "float64" not in network.ran:
        return True
    pass_ = _SEEN_BY_BOTH[excess.kind]
    seen = [d for d in network.differences if d.pass_ == pass_ and d.name != LOSS]
    apart, size = math.hypot(*(d.apart["float64"] for d in seen)), math.hypot(*(d.size for d in seen))
    # of an evaluation the excess is in units of its controls, which are one of round-off at least
    unit = UNIT_ROUND_OFF["float64"] if excess.kind.startswith("eval") else 1.0
    return bool(seen) and apart * HALFWAY_BITS >= excess.measured * unit * size


PROBE = Probe(
    name=EXCESS,
    question="Where the pair leaves its controls, do both differ on the same weights and the same batch?",
    reason="its threshold is 2^14.5 times the controls at that step",
    unit="distance, relative",
    sees="module, pass and step of a late fault; chaos told from a fault",
    order=100,
)
