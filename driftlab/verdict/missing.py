"""What a verdict lacks where nothing that could tell has been measured, and the setting that gives it."""

from __future__ import annotations

from collections.abc import Sequence

from driftlab.record.seed_record import SeedRecord

WIDE, NARROW = "float64", "float32"


def missing(records: Sequence[SeedRecord], subject: str) -> str:
    """In a sentence, less the number of seeds; about records none of which could tell.

    ``candidate`` asks for its own float64 and a control's beside it, ``control`` and ``reference`` for both
    dtypes, ``reference`` for a control as well.
    """
    arms = {arm for record in records for arm in record.arms}
    trained = sorted({arm.partition(".")[2] for arm in arms})
    wanted = (WIDE,) if subject == "candidate" else (NARROW, WIDE)
    controls = [a for a in arms if a.startswith("control") and a.endswith((f".{WIDE}", f".{NARROW}"))]
    if not set(wanted) <= set(trained):
        more = ",".join([NARROW, WIDE, *(dtype for dtype in trained if dtype not in (NARROW, WIDE))])
        alone = " and ".join(trained) or NARROW
        return f"{alone} alone cannot tell rounding from a bug: run again with dtypes=[{more}]"
    if subject == "candidate" and f"candidate.{WIDE}" not in arms:
        return (
            "the candidate has no float64, by which rounding is told from a bug: it does not run there, or "
            "computes in fewer bits all the same: let it keep to the dtype that it is given"
        )
    if subject != "control" and not controls:
        return "there is no control to compare with: run again with roles=[reference,candidate,control]"
    if subject == "control":
        return (
            "before any update the nudge shows in no output and no gradient: its weight has no say there, as "
            "one of a kernel that meets padding alone, or of a branch that begins at zero: nudge another, "
            "seeds.nudge=1, or give a network, or larger images, in which fewer weights are idle"
        )
    return "nothing finite to compare: check data, loss, learning rate"
