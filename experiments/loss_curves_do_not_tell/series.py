"""Single numbers out of what the seeds measured: by network, seed by seed; None where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from driftlab.verdict.outcomes import tail_of
from experiments.loss_curves_do_not_tell.networks import NETWORKS, Network
from suite.showing.wording import Values

Seed = Mapping[str, dict]
Of = Callable[[Seed, str], float | None]
REFERENCE = "reference"


def finite(value: object) -> float | None:
    """A number as JSON gave it back: what was NaN or inf is None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def last(seed: Seed, kind: str, role: str, dtype: str) -> float | None:
    """The value at the arm's last step; None where it blew up before."""
    arm = f"{role}.{dtype}"
    if seed["blown_up_at"][arm] is not None:
        return None
    return finite(seed["curves"][arm].get(kind, [None])[-1])


def at(seed: Seed, kind: str, role: str, dtype: str, step: int) -> float | None:
    """The value after ``step`` updates."""
    curve = seed["curves"][f"{role}.{dtype}"]
    if kind not in curve or step not in curve["step"]:
        return None
    return finite(curve[kind][curve["step"].index(step)])


def tail_loss(seed: Seed, role: str) -> float | None:
    """The mean of the float32 training loss over the last tenth of the steps."""
    arm = f"{role}.float32"
    curve = seed["curves"][arm]
    end = curve["step"][-1]
    losses = [v for s, v in zip(curve["step"], curve["loss"], strict=True) if s > end - tail_of(end)]
    return None if seed["blown_up_at"][arm] is not None else fmean(losses)


def relative(mine: float | None, theirs: float | None) -> float | None:
    """How far ``mine`` is from ``theirs``, as a share of it."""
    return None if mine is None or not theirs else mine / theirs - 1


def loss_off(seed: Seed, role: str) -> float | None:
    """The final float32 training loss beside the reference's (relative)."""
    return relative(*(last(seed, "loss", r, "float32") for r in (role, REFERENCE)))


def tail_loss_off(seed: Seed, role: str) -> float | None:
    """The same of the last tenth of the steps."""
    return relative(*(tail_loss(seed, r) for r in (role, REFERENCE)))


def accuracy_off(seed: Seed, role: str) -> float | None:
    """The test accuracy less the reference's (a share of the images)."""
    mine, theirs = (finite(seed["test"].get(r, {}).get("accuracy")) for r in (role, REFERENCE))
    return None if mine is None or theirs is None else mine - theirs


def drift_at_end(dtype: str) -> Of:
    """The weight distance from the reference after the last update."""
    return lambda seed, role: last(seed, "weight_distance", role, dtype)


def drift_at_first(dtype: str) -> Of:
    """The weight distance from the reference after one update."""
    return lambda seed, role: at(seed, "weight_distance", role, dtype, 1)


class Sign(NamedTuple):
    """Something that one could tell a wrong network by: the larger, the further from the reference."""

    key: str
    words: str
    of: Of


SIGNS = (
    Sign("loss", "final training loss", loss_off),
    Sign("accuracy", "test accuracy", accuracy_off),
    Sign("float32_first", "float32 drift after one update", drift_at_first("float32")),
    Sign("float32", "float32 drift at the end", drift_at_end("float32")),
    Sign("float64_first", "float64 drift after one update", drift_at_first("float64")),
    Sign("float64", "float64 drift at the end", drift_at_end("float64")),
)


def over_seeds(values: Values, of: Of, role: str) -> list[float]:
    """What ``of`` gives for each seed that has it."""
    return [v for seed in values.values() if (v := of(seed, role)) is not None]


def size(values: Values, role: str) -> float:
    """How far the gradients are from the reference's before any update, float64: the median over seeds."""
    found = over_seeds(values, lambda s, r: at(s, "gradient_distance", r, "float64", 0), role)
    return median(found) if found else math.inf


def by_size(values: Values) -> Sequence[Network]:
    """The same functions first, then the wrong ones, the smallest fault first."""
    return sorted(NETWORKS, key=lambda n: (not n.same, not n.same and size(values, n.role)))


class Overlap(NamedTuple):
    """How many of ``n`` wrong networks are no further from the reference than a right one gets.

    Attributes:
        apart: the least of a wrong one over the most of a right one; None where that is no number.
    """

    hidden: int
    n: int
    apart: float | None


def overlap(values: Values, sign: Sign) -> Overlap:
    """All seeds together; a wrong network that blew up is not hidden."""

    def sizes(same: bool) -> list[float]:
        roles = [network.role for network in NETWORKS if network.same is same]
        return [abs(v) for role in roles for v in over_seeds(values, sign.of, role)]

    wrong, most = sizes(same=False), max(sizes(same=True), default=0.0)
    n = len(values) * sum(not network.same for network in NETWORKS)
    apart = min(wrong) / most if wrong and most else None
    return Overlap(sum(v <= most for v in wrong), n, apart)
