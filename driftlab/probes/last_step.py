"""The pair after the last update, put on the same weights."""

from __future__ import annotations

from collections.abc import Callable

from driftlab.fold import FoldError, listed
from driftlab.lockstep.window import Snapshots
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.probes.later import at_later_step, examination_at, first_wrong, locate
from driftlab.probes.precision import PROBE as PRECISION
from driftlab.probes.probe import Probe
from driftlab.rounding import HALFWAY
from driftlab.words import Finding


def ask_last_step(
    snapshots: Snapshots, steps: int, earlier: Callable[[], Snapshots] | None = None
) -> list[Finding]:
    """Function and precision at the end of training; where they differ, the first wrong step by bisection.

    Args:
        earlier: makes the snapshots to search for the first wrong step, where these hold the last alone.
    """
    steps = min(steps, snapshots.last)
    last = examination_at(snapshots, steps)
    if last.wrong and (strays := snapshots.strays(steps)) and not _wrong_without(snapshots, steps):
        put_back = f"with what has no place in the other as it was at the start ({listed(strays)})"
        return [PROBE.finding(0.0, None, f"they do, at step {steps}, {put_back}")]
    if last.wrong:
        searched = earlier() if earlier else snapshots
        found = locate(searched, first_wrong(searched, steps)) or locate(snapshots, steps)
        return found or [at_later_step(f, steps) for f in FUNCTION.ask(last)]  # what explains it
    if last.network.untold():
        return [
            PROBE.not_applicable("the network is chaotic there: one unit in the last place changes it all")
        ]
    if last.network.in_float32_alone:
        return [PROBE.not_applicable("both run in float32 alone, in which training has parted them")]
    if not last.network.narrow():
        return [PROBE.finding(0.0, None, f"they do, at step {steps}")]
    return [at_later_step(f, steps) for f in PRECISION.ask(last) if f.evidence.supports]


def _wrong_without(snapshots: Snapshots, steps: int) -> bool:
    """Whether they differ on the same state too: what has no place in the other each has trained alone."""
    try:
        return examination_at(snapshots.with_strays_put_back(), steps).wrong
    except FoldError:  # the fold computes
        return True


PROBE = Probe(
    name="last_step",
    question="At the end of the window, on the same weights, do both still compute the same function, as "
    "precisely?",
    threshold=HALFWAY,
    reason="as `function` and `precision`",
    unit="times what rounding makes of it",
    sees="late faults of the float32 path alone",
    misses="what sets in after the last update",
    order=120,
)
