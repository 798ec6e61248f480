"""``local.windows=auto``: where a seed's local windows begin, chosen once an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from omegaconf import DictConfig

from driftlab.lockstep.control import ENSEMBLE
from suite.command.configuration import steps_in
from suite.running.chosen import Chosen
from suite.running.costs import Sketch, training_seconds
from suite.running.networks import probed_in

NAME = "local_windows"
# The next where the training is at least this much longer: what one misses shows in the next.
CLOSEST = 1.5


def local_choice(settings: DictConfig, sketch: Sketch) -> dict:
    """``local_windows`` as many as ``local.share`` of the training pays, and ``why``."""
    training = sum(
        training_seconds(settings, cost, steps_in(settings, d)) for d, cost in sketch.costs.items()
    )
    # beside the pair as many controls as ``diagnose`` has
    arms = (2 + len(ENSEMBLE)) / len(settings.roles)
    followed = [c for d, c in sketch.costs.items() if d in ("float64", "float32", probed_in(settings).name)]
    one = (settings.local.updates + 1) * arms * sum(c.step + c.row for c in followed)
    begins = spread(settings.steps, int(settings.local.share * training / one), settings.local.updates)
    why = f"{len(begins) * one / training:.0%} of the training, {one:.2g} s each on {sketch.device}"
    if not begins:
        share = f"local.share={settings.local.share}"
        why = f"one takes {one:.2g} s, the training {training:.2g} s: {share} pays none"
    return {NAME: begins, "why": why}


def spread(steps: int, most: int, updates: int) -> list[int]:
    """At most so many steps, evenly in the logarithm, the last as late as a window ends with the training.

    None overlaps another, or the first updates, which the curves themselves show.
    """
    first, last = updates + 1, steps - updates
    if last < first or most < 1:
        return []
    for count in range(most, 1, -1):
        begins = [round(first * (last / first) ** (k / (count - 1))) for k in range(count)]
        if all(b >= max(a * CLOSEST, a + updates + 1) for a, b in pairwise(begins)):
            return begins
    return [last]


def _are_windows(begins: object) -> bool:
    return (
        isinstance(begins, Sequence)
        and all(isinstance(b, int) and b >= 0 for b in begins)
        and all(b > a for a, b in pairwise(begins))
    )


WINDOWS = Chosen(NAME, setting="local.windows", field="windows", is_one=_are_windows)
