"""The measurements of all seeds together: a network at a time, and every step with its prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from experiments.questions.kinks.crossings import WIDTH
from experiments.questions.kinks.series import (
    LEAP_STEPS,
    Network,
    Values,
    changed,
    counts,
    drift,
    first_flip,
    growth,
    kinked_kinds,
    leap,
    leap_window,
)

# Label -> (activation, kind): whose sign changes or winners are counted.
GROUPS = {
    "signs, ReLU": ("relu", "signs"),
    "signs, SiLU (no kinks)": ("silu", "signs"),
    "max-pool winners, ReLU": ("relu", "winners"),
    "max-pool winners, SiLU": ("silu", "winners"),
}


def by_network(values: Values) -> dict[str, dict[int, Network]]:
    """Name -> seed -> the network's measurements, in the order of the settings."""
    found: dict[str, dict[int, Network]] = {}
    for seed, measured in values.items():
        for name, network in measured["networks"].items():
            found.setdefault(name, {})[seed] = network
    return found


def extremes(values: Values) -> tuple[str | None, str | None]:
    """The network with most kinds of kinks, and the one with none; None where there is no such network."""
    kinds = {name: len(kinked_kinds(next(iter(n.values())))) for name, n in by_network(values).items()}
    most = max(kinds, key=lambda name: kinds[name])
    return (most if kinds[most] else None), next((n for n, k in kinds.items() if not k), None)


def leaps(values: Values, name: str) -> dict[str, list[float]]:
    """Growth a step: ``before``, ``after`` in float32, and ``float64`` over the same steps as ``after``.

    A network that does not flip is taken over the windows of those that do, in the same seed.
    """
    found: dict[str, list[float | None]] = {"before": [], "after": [], "float64": []}
    for measured in values.values():
        network = measured["networks"].get(name)
        for begin, end in _windows(measured["networks"], network) if network else ():
            found["before"].append(growth(network, "float32", max(1, begin - LEAP_STEPS), begin))
            found["after"].append(growth(network, "float32", begin, end))
            found["float64"].append(growth(network, "float64", begin, end))
    return {key: [v for v in listed if v is not None] for key, listed in found.items()}


def leap_ratios(values: Values, name: str) -> list[float]:
    """Growth a step in float32 over that in float64, over the same steps (``leaps``)."""
    found = []
    for measured in values.values():
        network = measured["networks"].get(name)
        for window in _windows(measured["networks"], network) if network else ():
            found.append(leap(network, window))
    return [ratio for ratio in found if ratio is not None]


def _windows(networks: Mapping[str, Network], network: Network) -> list[tuple[int, int]]:
    own = leap_window(network)
    if own:
        return [own]
    return [w for other in networks.values() if (w := leap_window(other)) is not None]


def ends(networks: Iterable[Network], dtype: str) -> list[float]:
    """Drift at the last step of each, where there is one."""
    return [found[max(found)] for n in networks if (found := drift(n, dtype))]


class Step(NamedTuple):
    """Changes of one kind at one step of one network: how many could, how many did, and both predictions."""

    number: float
    counted: float
    near: float
    product: float
    near_half: float

    @property
    def saturated(self) -> bool:
        """Whether the mean perturbation is no longer small beside the interval that the density is of.

        A normal density at 0 is 1 / sqrt(2 pi) of an rms, so ``product`` over ``number`` is that times the
        mean perturbation in units of the rms; of a gap that falls off exponentially, nearly so (1/2 for 0.4).
        """
        return self.product > self.number * WIDTH / math.sqrt(2 * math.pi)


def steps_of(values: Values, label: str) -> list[Step]:
    """Every step of the float32 pair of every network of a group."""
    activation, kind = GROUPS[label]
    found = []
    for network in (n for n in _all(values) if n["network"]["activation"] == activation):
        seen = changed(network, kind, "float32")
        columns = [counts(network, kind, "float32", c) for c in ("near", "product", "near_half")]
        number = counts(network, kind, "float32", "number")
        found += [Step(number[s], seen[s], *(c[s] for c in columns)) for s in seen]
    return found


def up_to_first_flip(values: Values, law: str) -> tuple[float, float]:
    """(predicted, counted) float32 flips up to each network's first, that step included.

    Stopping there favours neither: the sum of counted less predicted is a martingale, 0 on average at any
    step that is chosen without looking ahead.
    """
    predicted = counted = 0.0
    for network in _all(values):
        first = first_flip(network)
        for kind in kinked_kinds(network):
            seen = changed(network, kind, "float32")
            for step, p in counts(network, kind, "float32", law).items():
                if first is None or step <= first:
                    predicted, counted = predicted + p, counted + seen[step]
    return predicted, counted


def ties(values: Values, dtype: str) -> float:
    return sum(sum(counts(n, "winners", dtype, "ties").values()) for n in _all(values))


def kinks_crossed(values: Values, dtype: str, law: str) -> tuple[float, float]:
    """(predicted, counted) flips of all networks and steps."""
    listed = [(n, kind) for n in _all(values) for kind in kinked_kinds(n)]
    predicted = sum(sum(counts(n, kind, dtype, law).values()) for n, kind in listed)
    return predicted, sum(sum(changed(n, kind, dtype).values()) for n, kind in listed)


def _all(values: Values) -> list[Network]:
    return [n for measured in values.values() for n in measured["networks"].values()]


def spread(found: Sequence[float], write: Callable[[float], str]) -> str | None:
    """ "median (least to greatest)", the median alone where all are written alike; None of nothing."""
    if not found:
        return None
    low, middle, high = write(min(found)), write(median(found)), write(max(found))
    return middle if low == high else f"{middle} ({low} to {high})"
