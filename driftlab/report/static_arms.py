"""How an arm is drawn on paper: its seeds, their median and range, where it blew up, its first sign flip.

Colour tells the role, line style the dtype. The hues are near those of Okabe and Ito ("Color Universal
Design", 2008), which colour-blind readers tell apart; lightness parts the roles in a grey print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from driftlab.records import SeedRecord
from driftlab.report import axes as scale
from driftlab.report.series import Bundle, first_flips, thin

# By role, in the order in which they are drawn: what is judged is never hidden.
COLOURS = {"reference": "#000000", "control": "#56b4e9", "candidate": "#c04e00"}
# Beyond so many seeds, thin lines hide each other; the range stays.
MOST_LINES = 20

_LINE_STYLES = {"float32": "-", "float64": (0, (3, 1.2))}
# A wrong function is as wrong in float64, so the two lie on each other: the upper one has to differ.
_BRIGHTNESS = {"float32": 1.0, "float64": 0.5}


def role(arm: str) -> str:
    """What stands before the dot."""
    return arm.partition(".")[0]


def look(arm: str) -> dict:
    """Colour and line style, as matplotlib's keywords."""
    name, _, dtype = arm.partition(".")
    colour = tuple(_BRIGHTNESS[dtype] * part for part in to_rgb(COLOURS[name]))
    return {"color": colour, "linestyle": _LINE_STYLES[dtype]}


def in_drawing_order(bundles: Iterable[Bundle]) -> list[Bundle]:
    """float64 over float32, and in each the roles in the order of ``COLOURS``."""
    return sorted(bundles, key=lambda b: (b.arm.partition(".")[2], list(COLOURS).index(role(b.arm))))


def draw_seeds(ax: Axes, drawn: Bundle) -> None:
    """The range of all seeds and, while they are few, each of them."""
    if len(drawn.values) < 2:
        return
    low, high = drawn.range
    ax.fill_between(drawn.steps, low, high, color=look(drawn.arm)["color"], alpha=0.15, linewidth=0)
    if len(drawn.values) <= MOST_LINES:
        for values in drawn.values:
            _line(ax, drawn, values, linewidth=0.35, alpha=0.6)


def stroke(underneath: bool) -> dict:
    """Of a median; ``underneath``: broad and pale, so that a curve that lies on it is still seen."""
    return {"linewidth": 2.6, "alpha": 0.3} if underneath else {"linewidth": 1.1, "alpha": 1.0}


def draw_median(ax: Axes, drawn: Bundle, underneath: bool) -> None:
    """The line that the eye should follow."""
    _line(ax, drawn, drawn.median, **stroke(underneath))


def _line(ax: Axes, drawn: Bundle, values: np.ndarray, **style: float) -> None:
    kept = thin(scale.places(ax, drawn.steps), values)
    finite = np.where(np.isfinite(values[kept]), values[kept], np.nan)
    ax.plot(drawn.steps[kept], finite, **look(drawn.arm), **style)


def draw_ends(ax: Axes, drawn: Bundle) -> list[str]:
    """A cross at the last finite value of each seed that blew up, at most at the axis' top; in words."""
    infinite = int(np.isinf(drawn.values).any(axis=1).sum())
    if not infinite:
        return []
    cross = {"marker": "x", "markersize": 3.5, "markeredgewidth": 0.9, "color": look(drawn.arm)["color"]}
    for step, value in drawn.last_finite:
        ax.plot(step, min(value, ax.get_ylim()[1]), clip_on=False, **cross)
    n = len(drawn.values)
    return [
        f"Cross: last finite value of {drawn.arm}, which blew up in {infinite} of {n} seed{'s' * (n > 1)}."
    ]


def mark_first_flips(ax: Axes, bundles: Iterable[Bundle], records: Sequence[SeedRecord]) -> list[str]:
    """A dotted upright at each arm's first step with a sign flip, median over seeds; in words."""
    said = []
    for drawn in bundles:
        steps = [s for s in first_flips(records, drawn.arm) if s is not None]
        if steps:
            middle = float(np.median(steps))
            ax.axvline(middle, color=look(drawn.arm)["color"], linestyle=(0, (1, 1.5)), linewidth=0.7)
            some = "" if len(steps) == len(records) else f" ({len(steps)} of {len(records)} seeds)"
            said.append(f"{drawn.arm} step {middle:g}{some}")
    return [f"Dotted upright: first sign flip, {', '.join(said)}."] if said else []
