"""The figure: what can be seen of each network, a mark a seed, the smallest fault first."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from driftlab.report.axes import power
from driftlab.report.sections import Figure, Look
from experiments.questions.loss_curves.networks import CONTROL, Network
from experiments.questions.loss_curves.series import (
    SIGNS,
    Seed,
    Sign,
    Values,
    by_size,
    drift_at_first,
    over_seeds,
    overlap,
    size,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_LABELS = {
    "loss": "final training loss\nbeside the reference (%)",
    "float32": "drift, float32\n(weight distance)",
    "float64": "drift, float64\n(weight distance)",
}
_EARLY = {"float32": drift_at_first("float32"), "float64": drift_at_first("float64")}
Of = Callable[[Seed, str], float | None]
SPREAD = 0.6  # of the distance between two networks: over this the seeds are laid out


def figures(values: Values) -> list[Figure]:
    shown = [sign for sign in SIGNS if sign.key in _LABELS]
    return [
        Figure("networks", _title(values), partial(_draw, values, shown), _caption(values), aspect=1.15),
    ]


def _title(values: Values) -> str:
    hidden = {s.key: overlap(values, s).hidden for s in SIGNS}
    if hidden["loss"] and not hidden["float64"]:
        return "The final loss hides the bugs, float64 drift shows them"
    return "Final loss, and drift in both dtypes"


def _caption(values: Values) -> str:
    zero = any(v == 0 for d in SIGNS[2:] for n in by_size(values) for v in over_seeds(values, d.of, n.role))
    return (
        f"A mark a seed (n = {len(values)}). Circles: the same function; crosses: a planted bug. Shaded: the "
        "control's range at the end. Large marks: at the end; small ones: after one update."
        f"{' Lowest marks: exactly 0.' if zero else ''} Under each name: gradient distance at step 0, "
        "float64 (median)."
    )


def _draw(values: Values, shown: list[Sign], canvas: Canvas, look: Look) -> None:
    networks = by_size(values)
    canvas.subplots_adjust(left=0.17, right=0.98, bottom=0.085, top=0.985, hspace=0.12)
    for ax, sign in zip(canvas.subplots(len(shown), 1, sharex=True), shown, strict=True):
        floor = _prepare(ax, values, networks, sign)
        _shade(ax, values, sign.of, floor, look)
        early = _EARLY.get(sign.key)
        for place, network in enumerate(networks):
            _marks(ax, values, network, place, sign.of, floor, look)
            if early:
                _marks(ax, values, network, place, early, floor, look).set_markersize(2.5)
        ax.set_ylabel(_LABELS[sign.key])
        ax.grid(False, axis="x")
    ax.set_xticks(range(len(networks)), [_name(values, n) for n in networks])
    ax.set_xlim(-0.6, len(networks) - 0.4)


def _name(values: Values, network: Network) -> str:
    return f"{network.role}\n{size(values, network.role):.0e}"


def _prepare(ax: Axes, values: Values, networks: list[Network], sign: Sign) -> float | None:
    """The scale of the axis; where a logarithmic one puts what is exactly 0."""
    if sign.key == "loss":
        ax.axhline(0, color=ax.xaxis.label.get_color(), linewidth=0.7)
        return None
    both = (sign.of, _EARLY[sign.key])
    found = [v for of in both for n in networks for v in over_seeds(values, of, n.role) if v > 0] or [1.0]
    low, high = (math.floor(math.log10(min(found))), math.ceil(math.log10(max(found))))
    ax.set_yscale("log")
    ax.set_ylim(10.0 ** (low - 0.8), 10.0 ** (high + 0.2))
    every = max(1, math.ceil((high - low) / 5))
    ticks = [10.0**n for n in range(high, low - 1, -every)]
    ax.set_yticks(ticks, [power(10, t) for t in ticks])
    ax.minorticks_off()
    return 10.0 ** (low - 0.6)


def _shade(ax: Axes, values: Values, of: Of, floor: float | None, look: Look) -> None:
    control = over_seeds(values, of, CONTROL)
    if control:
        low, high = min(control), max(control)
        low, high = (100 * low, 100 * high) if floor is None else (max(low, floor), max(high, floor))
        ax.axhspan(low, high, color=look.grid, zorder=0)


def _marks(ax: Axes, values: Values, network: Network, place: int, of: Of, floor: float | None, look: Look):
    """A mark a seed beside each other, of those that have a value; the drawn line."""
    at, shown = [], []
    for number, seed in enumerate(values.values()):
        value = of(seed, network.role)
        if value is not None:
            at.append(place + SPREAD * ((number + 0.5) / len(values) - 0.5))
            shown.append(100 * value if floor is None else max(value, floor))
    marker, colour = ("o", look.series[1]) if network.same else ("x", look.series[0])
    (line,) = ax.plot(at, shown, marker, color=colour, markersize=4.5, markerfacecolor="none")
    return line
