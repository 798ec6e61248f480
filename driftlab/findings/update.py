"""Do the two optimizers move folded weights alike?"""

from __future__ import annotations

from dataclasses import replace

from driftlab.examination import Examination
from driftlab.fold import identity_fold
from driftlab.probes.updates import THRESHOLD, Update, wrong_update
from driftlab.verdict import Evidence, Verdict

QUESTION = "Given the same gradients, do the two optimizers move folded weights alike?"
# The network takes no part, so many updates cost little; what strikes late has a longer time to show.
STEPS = 50


def ask_update(found: Examination) -> None:
    subject = found.subject
    try:
        update = wrong_update(subject, STEPS)
        fewer_bits = update is not None and wrong_update(subject, STEPS, in_shadow=True) is None
    except (
        Exception
    ) as error:  # an optimizer that needs a closure, or a state that the probe does not give it
        message = " ".join(str(error).split())[:120]
        reading = f"not asked: {type(error).__name__}: {message}"
        found.add(Evidence("update", QUESTION, None, THRESHOLD, None, reading))
        return
    if update is not None and (wavering := _wavers(found)):
        why = "given the same gradients twice, the candidate's optimizer does not repeat itself"
        found.add(
            Evidence("update", QUESTION, wavering.measured, 0.0, Verdict.NONDETERMINISTIC, why),
            wavering.place,
        )
        return
    if update is None:
        found.add(Evidence("update", QUESTION, 0.0, THRESHOLD, None, f"they do, over {STEPS} updates"))
        return
    why = f": {update.why}" if update.why else ""
    reading = (
        f"{update.tensor} goes another way in update {update.place.step}, {update.measured:.2g} (relative) "
        f"off{why}"
    )
    supports = Verdict.REDUCED_PRECISION if fewer_bits else Verdict.BUG
    if fewer_bits:
        reading += "; with the rounding taken away it does not"
    found.add(Evidence("update", QUESTION, update.measured, THRESHOLD, supports, reading), update.place)


def _wavers(found: Examination) -> Update | None:
    """The candidate beside itself."""
    subject = found.subject
    twice = replace(
        subject,
        reference=subject.candidate,
        optimizer=subject.candidate_optimizer,
        fold=identity_fold(subject.candidate),
    )
    return wrong_update(twice, STEPS)
