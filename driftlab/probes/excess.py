"""Where a pair leaves its controls: is it a module, the update before it, or rounding carried on?"""

from __future__ import annotations

from driftlab.lockstep.window import Snapshots
from driftlab.probes.later import first_wrong, locate
from driftlab.probes.probe import Probe
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
    says = f"they do not, at step {excess.step}: what is seen there is rounding, carried on by the training"
    return [PROBE.finding(0.0, Verdict.ROUND_OFF, says, threshold=allowed)]


PROBE = Probe(
    name=EXCESS,
    question="Where the pair leaves its controls, do both differ on the same weights and the same batch?",
    reason="its threshold is 2^14.5 times the controls at that step",
    sees="module, pass and step of a late fault; chaos told from a fault",
    order=100,
)
