"""Where a difference arises: every pair of modules by itself, fed the reference's exact inputs.

A picture of what the probes have measured already: ``Local`` keeps the comparisons that the rewritten
modules, the precision and the place were judged by, and nothing is run a second time for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from driftlab.arithmetic.difference import PASSES, Difference
from driftlab.arithmetic.local import Local


def layers(local: Local, accused: Collection[str] = ()) -> list[dict]:
    """One entry a pair of modules, the smallest there are, in the order of the forward pass.

    Args:
        accused: reference names that a verdict places a difference at; these are looked at on all samples,
            the others on a few.

    Returns:
        Dicts of plain values, for ``run.json``: ``module`` (the reference's name), ``rewritten`` (whether
        the two may compute differently) and ``passes``: for each pass its worst quantity, as ‖Δ‖₂ relative to
        the reference's. ``float32`` is the difference as computed, ``exact`` that with the rounding taken
        away (None where neither float64 nor shadow execution runs); ``float32_explained`` and
        ``exact_explained`` are the largest that rounding explains. ``passes`` is empty where both are the
        same code with the same settings, or where they take other arguments.
    """
    rewritten = set(local.rewritten())
    shown = rewritten | (set(accused) & local.calls.keys() & local.counterparts.keys())
    entries = []
    for name in _smallest(local, shown):
        compared = local.comparisons(name, few=name not in accused) if name in shown else []
        by_pass = {p: [d for c in compared for d in c.differences if d.pass_ == p] for p in PASSES}
        passes = {p: _worst(found) for p, found in by_pass.items() if found}
        entries.append({"module": name, "rewritten": name in rewritten, "passes": passes})
    return entries


def _smallest(local: Local, shown: Collection[str]) -> list[str]:
    """The pairs without a pair inside, but those in ``shown`` whatever is in them, and not their parts."""
    paired = [n for n in local.calls if n in local.counterparts]
    return [
        n
        for n in paired
        if n in shown or not (_inside_any(n, shown) or any(_inside_any(o, [n]) for o in paired))
    ]


def _inside_any(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _worst(found: list[Difference]) -> dict[str, float | None]:
    """Of the quantity that rounding explains least, in units of that quantity."""
    exact = next((a for a in ("shadow", "float64") if all(a in d.apart for d in found)), None)
    worst = max(found, key=lambda d: (d.excess(exact or "float32"), _relative(d, d.apart["float32"])))
    sizes = {"float32": worst.apart["float32"]}
    if exact:
        explained = worst.precision.narrower * (worst.expected_error or math.inf)
        sizes |= {"exact": worst.apart[exact], "float32_explained": explained}
        sizes |= {"exact_explained": _explained(worst, exact)}
    unknown = dict.fromkeys(("float32", "exact", "float32_explained", "exact_explained"))
    return unknown | {name: float(f"{_relative(worst, size):.3g}") for name, size in sizes.items()}


def _relative(d: Difference, size: float) -> float:
    yardstick = max(d.size, d.scale)
    return size / yardstick if yardstick else (math.inf if size else 0.0)


def _explained(d: Difference, arithmetic: str) -> float:
    """The difference at which ``excess`` is 1."""
    one = replace(d, apart={arithmetic: 1.0}).excess(arithmetic)
    return 1 / one if one else math.inf
