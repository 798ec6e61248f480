"""The figure: what can be seen of each network, a mark a seed, the smallest fault first."""

from __future__ import annotations

import math
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from driftlab.report.axes import power
from driftlab.report.sections import Figure, Look
from experiments.loss_curves_do_not_tell.networks import CONTROL, Network
from experiments.loss_curves_do_not_tell.series import SIGNS, Of, by_size, over_seeds, overlap, size
from suite.showing.wording import Values

_SIGNS = {sign.key: sign for sign in SIGNS}
_LABELS = {
    "loss": "final training loss\nbeside the reference (%)",
    "float32": "drift, float32\n(weight distance)",
    "float64": "drift, float64\n(weight distance)",
}
SPREAD = 0.6  # of the distance between two networks: over this the seeds are laid out


def figures(values: Values) -> list[Figure]:
    return [Figure("networks", _title(values), partial(_draw, values), _caption(values), aspect=1.15)]


def _title(values: Values) -> str:
    if overlap(values, _SIGNS["loss"]).hidden and not overlap(values, _SIGNS["float64"]).hidden:
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


def _draw(values: Values, canvas: Canvas, look: Look) -> None:
    networks = by_size(values)
    canvas.subplots_adjust(left=0.17, right=0.98, bottom=0.085, top=0.985, hspace=0.12)
    for ax, key in zip(canvas.subplots(len(_LABELS), 1, sharex=True), _LABELS, strict=True):
        late, early = _SIGNS[key].of, _SIGNS[f"{key}_first"].of if key != "loss" else None
        floor = _log(ax, values, (late, early)) if early else None
        if early is None:
            ax.axhline(0, color=ax.xaxis.label.get_color(), linewidth=0.7)
        control = _heights(over_seeds(values, late, CONTROL), floor)
        if control:
            ax.axhspan(min(control), max(control), color=look.grid, zorder=0)
        for place, network in enumerate(networks):
            _marks(ax, values, network, place, late, floor, look)
            if early:
                _marks(ax, values, network, place, early, floor, look).set_markersize(2.5)
        ax.set_ylabel(_LABELS[key])
        ax.grid(False, axis="x")
    ax.set_xticks(range(len(networks)), [f"{n.role}\n{size(values, n.role):.0e}" for n in networks])
    ax.set_xlim(-0.6, len(networks) - 0.4)


def _log(ax: Axes, values: Values, shown: tuple[Of, ...]) -> float:
    """A logarithmic axis for what is shown; where it puts what is exactly 0."""
    found = [v for of in shown for n in by_size(values) for v in over_seeds(values, of, n.role) if v > 0]
    low, high = (
        math.floor(math.log10(min(found, default=1.0))),
        math.ceil(math.log10(max(found, default=1.0))),
    )
    ax.set_yscale("log")
    ax.set_ylim(10.0 ** (low - 0.8), 10.0 ** (high + 0.2))
    ticks = [10.0**n for n in range(high, low - 1, -max(1, math.ceil((high - low) / 5)))]
    ax.set_yticks(ticks, [power(10, t) for t in ticks])
    ax.minorticks_off()
    return 10.0 ** (low - 0.6)


def _heights(found: list[float], floor: float | None) -> list[float]:
    """In percent on the linear axis, which has no floor."""
    return [100 * v if floor is None else max(v, floor) for v in found]


def _marks(
    ax: Axes, values: Values, network: Network, place: int, of: Of, floor: float | None, look: Look
) -> Line2D:
    """A mark a seed beside each other, of those that have a value."""
    found = [of(seed, network.role) for seed in values.values()]
    at = [
        place + SPREAD * ((number + 0.5) / len(found) - 0.5)
        for number, value in enumerate(found)
        if value is not None
    ]
    marker, colour = ("o", look.series[1]) if network.same else ("x", look.series[0])
    heights = _heights([value for value in found if value is not None], floor)
    (line,) = ax.plot(at, heights, marker, color=colour, markersize=4.5, markerfacecolor="none")
    return line
