"""What the stored curves of one network hold, by step: drift, flips, growth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

Network = Mapping[str, object]
Values = Mapping[int, Mapping[str, Mapping[str, Network]]]

# Steps after the first flip over which growth is taken: flips make flips, so a leap takes a few.
LEAP_STEPS = 5
# A law that forgets one of two directions, or counts it twice, is off by a factor of 2: half way to there.
HALFWAY_FLIPS = math.sqrt(2)
# From this many predicted flips on, a single step says something: a Poisson count is then within a third.
MANY = 10.0


def column(network: Network, name: str) -> dict[int, float]:
    """Step -> value, where there is one."""
    return {s: v for s, v in zip(network["steps"], network["curves"][name], strict=True) if v is not None}


def drift(network: Network, dtype: str) -> dict[int, float]:
    """The weight distance of the control, step by step."""
    return column(network, f"weight_distance/control.{dtype}")


def counts(network: Network, kind: str, dtype: str, count: str) -> dict[int, float]:
    """One of ``crossings.COUNTS``, summed over layers; empty where the network has no such layer."""
    found = network["crossings"].get(f"{kind}/{dtype}", {}).get(count, ())
    return {s: v for s, v in zip(network["steps"], found, strict=False) if v is not None}


def changed(network: Network, kind: str, dtype: str) -> dict[int, float]:
    """Signs or winners that differ, ties left out."""
    ties = counts(network, kind, dtype, "ties")
    return {s: v - ties[s] for s, v in counts(network, kind, dtype, "changed").items()}


def kinked_kinds(network: Network) -> list[str]:
    """Where the network has kinks: the signs of ReLU, the winners of max-pool."""
    options = network["network"]
    kinds = ["signs"] if options["activation"] == "relu" else []
    return kinds + (["winners"] if options["pool"] == "max" else [])


def flips(network: Network, dtype: str) -> dict[int, float]:
    """Kinks with the control on the other side, step by step, ties left out; 0 where there are no kinks."""
    found = dict.fromkeys(drift(network, dtype), 0.0)
    for kind in kinked_kinds(network):
        for step, value in changed(network, kind, dtype).items():
            found[step] = found.get(step, 0.0) + value
    return found


def first_flip(network: Network, dtype: str = "float32") -> int | None:
    return next((s for s, v in flips(network, dtype).items() if v > 0), None)


def growth(network: Network, dtype: str, begin: int, end: int) -> float | None:
    """The factor a step by which drift grows from ``begin`` to ``end``; None where it cannot be told."""
    found = drift(network, dtype)
    if begin >= end or begin not in found or not found.get(end) or not _spread(found, begin):
        return None
    return (found[end] / found[begin]) ** (1 / (end - begin))


def _spread(found: Mapping[int, float], step: int) -> bool:
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
    quiet = [s for s in quiet if _spread(narrow, s) and _spread(wide, s)]
    return median(math.log2(wide[s] / narrow[s]) for s in quiet) if quiet else None


def law_ratios(network: Network, kind: str, law: str) -> list[float]:
    """Counted over predicted flips of the float32 pair, at every step with ``MANY`` or more predicted."""
    seen, predicted = changed(network, kind, "float32"), counts(network, kind, "float32", law)
    return [seen[s] / p for s, p in predicted.items() if p >= MANY]
