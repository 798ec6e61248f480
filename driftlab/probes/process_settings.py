"""Do the networks leave the settings of the whole process as they are?

``torch.set_float32_matmul_precision("high")`` in a rewrite makes TF32 of every product, the reference's too.
Such settings are put back before each run, so the pair is judged in all bits of float32; whoever takes the
rewrite over gets fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.process import CANDIDATE, REFERENCE, REWRITE, TRAINING, changed_by
from driftlab.process.flags import Change
from driftlab.words import PROCESS_SETTINGS, Finding, Verdict


def ask(found: Examination) -> list[Finding]:
    """What the reference sets as well is no change that the candidate makes."""
    reference, changed = changed_by(REFERENCE), found.pair.changed + changed_by(CANDIDATE)
    bits = min((c.bits for c in changed if c.bits and c not in reference), default=None)
    says = _said({REFERENCE: reference, REWRITE: found.pair.changed, CANDIDATE: changed_by(CANDIDATE)})
    if bits:
        says += f". Left so, float32 keeps {bits} bits of 24 where the hardware can, in the reference too"
        return [PROBE.finding(bits, Verdict.REDUCED_PRECISION, says)]
    return [PROBE.finding(24, None, says or "it does")]


def ask_trained() -> list[Finding]:
    """What nobody had changed before the training; by an arm, or an optimizer, that has no name."""
    before = [c for who in (REFERENCE, REWRITE, CANDIDATE) for c in changed_by(who)]
    late = [c for c in changed_by(TRAINING) if c not in before]
    return [TRAINED.finding(None, None, _said({TRAINING: late}))] if late else []


def _said(changed: Mapping[str, list[Change]]) -> str:
    parts = [f"{who} changes {', '.join(map(str, changes))}" for who, changes in changed.items() if changes]
    return "; ".join(parts) + " (put back before each run)" if parts else ""


PROBE = Probe(
    name=PROCESS_SETTINGS,
    question="Does the candidate leave float32 all its bits in the whole process?",
    threshold=24,
    reason="all that float32 has",
    unit="bits",
    sees="TF32 or bfloat16 turned on by the rewrite or in a forward or backward pass, deterministic kernels "
    "turned off",
    misses="settings made before the rewrite is handed over; they are not in force while driftlab measures",
    order=11,
    ask=ask,
    asserted=True,
)
TRAINED = Probe(
    name="training_settings",
    question="Which settings of the whole process does the training change?",
    decides=False,
)
