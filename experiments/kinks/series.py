"""What was stored: drift, flips and growth of one network by step, and of all networks of all seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from experiments.kinks.crossings import WIDTH
from suite.showing.wording import Values, each

Network = Mapping[str, Any]

# Steps after the first flip over which growth is taken: flips make flips, so a leap takes a few.
LEAP_STEPS = 5
# A law that forgets one of two directions, or counts it twice, is off by a factor of 2: half way to there.
HALFWAY_FLIPS = math.sqrt(2)
# From this many predicted flips on, a single step says something: a Poisson count is then within a third.
MANY = 10.0
# Label -> (activation, kind): whose sign changes or winners are counted.
GROUPS = {
    "signs, ReLU": ("relu", "signs"),
    "signs, SiLU (no kinks)": ("silu", "signs"),
    "max-pool winners, ReLU": ("relu", "winners"),
    "max-pool winners, SiLU": ("silu", "winners"),
}


def known(found: Iterable[float | None]) -> list[float]:
    """Those that are a number."""
    return [v for v in found if v is not None]


# One network, step by step.


def drift(network: Network, dtype: str) -> dict[int, float]:
    """The weight distance of the control."""
    return _by_step(network, network["curves"][f"weight_distance/control.{dtype}"])


def counts(network: Network, kind: str, dtype: str, count: str) -> dict[int, float]:
    """One of ``crossings.COUNTS``, summed over layers; empty where the network has no such layer."""
    found = network["crossings"].get(f"{kind}/{dtype}")
    return _by_step(network, found[count]) if found else {}


def _by_step(network: Network, column: list[float | None]) -> dict[int, float]:
    return {s: v for s, v in zip(network["steps"], column, strict=True) if v is not None}


def changed(network: Network, kind: str, dtype: str) -> dict[int, float]:
    """Signs or winners that differ, ties left out."""
    ties = counts(network, kind, dtype, "ties")
    return {s: v - ties[s] for s, v in counts(network, kind, dtype, "changed").items()}


def kinked_kinds(network: Network) -> list[str]:
    """Where the network has kinks: the signs of ReLU, the winners of max-pool."""
    options = network["network"]
    kinked = {"signs": options["activation"] == "relu", "winners": options["pool"] == "max"}
    return [kind for kind, there in kinked.items() if there]


def first_flip(network: Network, dtype: str = "float32") -> int | None:
    """The first step at which the control is on the other side of a kink, ties left out."""
    seen = [changed(network, kind, dtype) for kind in kinked_kinds(network)]
    return min((s for flips in seen for s, v in flips.items() if v > 0), default=None)


def growth(network: Network, dtype: str, begin: int, end: int) -> float | None:
    """The factor a step by which drift grows from ``begin`` to ``end``; None where it cannot be told."""
    found = drift(network, dtype)
    if begin >= end or begin not in found or not found.get(end) or not _has_spread(found, begin):
        return None
    return (found[end] / found[begin]) ** (1 / (end - begin))


def _has_spread(found: Mapping[int, float], step: int) -> bool:
    """Whether the nudge has moved more than its own weight: a nudge may be lost in the next rounding."""
    return found[step] > 2 * found.get(0, 0.0)


def leap_window(network: Network) -> tuple[int, int] | None:
    """From the first flip, which the weights do not feel yet, ``LEAP_STEPS`` on."""
    first = first_flip(network)
    return None if first is None else (first, first + LEAP_STEPS)


def leap(network: Network, window: tuple[int, int]) -> float | None:
    """How much more a step float32 drift grows than float64 drift, over the same steps."""
    narrow, wide = (growth(network, dtype, *window) for dtype in ("float32", "float64"))
    return narrow / wide if narrow and wide else None


def quiet_ratio(network: Network) -> float | None:
    """log2 of float64 over float32 drift, the median over the steps from 1 up to the first flip.

    Steps at which a nudge has not spread yet are left out; None where there are no others.
    """
    first = first_flip(network)
    narrow, wide = drift(network, "float32"), drift(network, "float64")
    quiet = [s for s in narrow.keys() & wide.keys() if s > 0 and (first is None or s <= first)]
    ratios = [wide[s] / narrow[s] for s in quiet if _has_spread(narrow, s) and _has_spread(wide, s)]
    return median(map(math.log2, ratios)) if ratios else None


# All networks of all seeds.


def by_network(values: Values) -> dict[str, list[Network]]:
    """Name -> the network's measurements, seed by seed, in the order of the settings."""
    found: dict[str, list[Network]] = {}
    for networks in each(values, "networks"):
        for name, network in networks.items():
            found.setdefault(name, []).append(network)
    return found


def extremes(values: Values) -> tuple[str | None, str | None]:
    """The network with most kinds of kinks, and the one with none; None where there is no such network."""
    kinds = {name: len(kinked_kinds(found[0])) for name, found in by_network(values).items()}
    most = max(kinds, key=lambda name: kinds[name])
    return (most if kinds[most] else None), next((n for n, k in kinds.items() if not k), None)


def leaps(values: Values, name: str) -> dict[str, list[float]]:
    """Growth a step: ``before``, ``after`` in float32, ``float64`` over the steps of ``after``, their ratio.

    A network that does not flip is taken over the windows of those that do, in the same seed.
    """
    found: dict[str, list[float | None]] = {"before": [], "after": [], "float64": [], "ratio": []}
    for networks in each(values, "networks"):
        if network := networks.get(name):
            own = leap_window(network)
            for begin, end in [own] if own else known(map(leap_window, networks.values())):
                found["before"].append(growth(network, "float32", max(1, begin - LEAP_STEPS), begin))
                found["after"].append(growth(network, "float32", begin, end))
                found["float64"].append(growth(network, "float64", begin, end))
                found["ratio"].append(leap(network, (begin, end)))
    return {key: known(listed) for key, listed in found.items()}


def ends(networks: Iterable[Network], dtype: str) -> list[float]:
    """Drift at the last step of each, where there is one."""
    return [found[max(found)] for n in networks if (found := drift(n, dtype))]


class Step(NamedTuple):
    """Changes of one kind at one step of one network: how many did, how many could, and the predictions."""

    counted: float
    number: float
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
    for network in (n for n in all_networks(values) if n["network"]["activation"] == activation):
        columns = [counts(network, kind, "float32", c) for c in Step._fields[1:]]
        seen = changed(network, kind, "float32")
        found += [Step(v, *(column[s] for column in columns)) for s, v in seen.items()]
    return found


def many_predicted(values: Values) -> list[Step]:
    """The steps that say something by themselves, of all groups."""
    return [s for label in GROUPS for s in steps_of(values, label) if s.near >= MANY]


def crossed(values: Values, law: str, dtype: str, up_to_first_flip: bool = False) -> tuple[float, float]:
    """(predicted, counted) flips of all networks and steps, or up to each network's first, that included.

    Stopping there favours neither: the sum of counted less predicted is a martingale, 0 on average at any
    step that is chosen without looking ahead.
    """
    predicted = counted = 0.0
    for network in all_networks(values):
        last = first_flip(network) if up_to_first_flip else None
        for kind in kinked_kinds(network):
            seen = changed(network, kind, dtype)
            for step, p in counts(network, kind, dtype, law).items():
                if last is None or step <= last:
                    predicted, counted = predicted + p, counted + seen[step]
    return predicted, counted


def all_networks(values: Values) -> list[Network]:
    return [n for networks in each(values, "networks") for n in networks.values()]
