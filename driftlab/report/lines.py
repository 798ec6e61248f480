"""Curves over steps as lines: seeds, their median and range, first flips, blow-ups; on a page or on paper.

Colour tells the role, line style the dtype. What is said of it beneath a figure differs, and stands there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from driftlab.record.seed_record import SeedRecord
from driftlab.report.axes import places
from driftlab.report.series import Bundle, first_flips, role, thin
from driftlab.report.svg import INK

# Drawn in this order, so that what is judged is never hidden.
_LAYERS = {"reference": 1, "control": 2, "candidate": 3}
# Of dtypes whose line is everywhere the same; float64's is of where it is drawn.
STYLES = {"float32": "-", "bf16-mixed": ":", "16-mixed": "-.", "bf16-true": (0, (1, 3))}
# The share of the seeds that the darker band holds.
_MOST_SEEDS = 0.05, 0.95
# So many crosses tell where blow-ups are; more hide each other.
CROSSES = 100
# Points of one arm's seeds together, so that a hundred seeds take no more room than twenty.
_POINTS = 8000


@dataclass(frozen=True)
class Medium:
    """What curves look like on a page, or on paper.

    Attributes:
        colours: by role.
        float64: the line style of float64.
        darkened: what the colours of float64 are multiplied by.
        most_lines: beyond so many seeds lines of their own tell nothing.
        examples: how many are then drawn none the less, beside a darker band of nine tenths of them.
        seed: the line of one of so many seeds.
        median: of a median; ``underneath`` where another may lie on it.
        band, flip, cross: the range, the upright at a first flip, the end of a seed that blew up.
        band_points: of at most so many points is the edge of a band.
        on_axis: whether a cross stays below the top of the axis.
        gid: the id of what is drawn of an arm, where a reader can pick it out.
    """

    colours: Mapping[str, str]
    float64: tuple
    darkened: float
    most_lines: int
    examples: int
    seed: Callable[[int], dict]
    median: dict
    underneath: dict
    band: dict
    flip: dict
    cross: dict
    band_points: int = 200
    on_axis: bool = False
    gid: Callable[[str, str], str | None] = lambda arm, part: None

    def look(self, arm: str) -> dict:
        """Colour and line style, as matplotlib's keywords."""
        name, _, dtype = arm.partition(".")
        shade = self.darkened if dtype == "float64" else 1.0
        colour = tuple(shade * part for part in to_rgb(self.colours.get(name, INK)))
        return {"color": colour, "linestyle": {"float64": self.float64}.get(dtype) or STYLES.get(dtype, ":")}

    def draw_seeds(self, ax: Axes, drawn: Bundle) -> None:
        """The range as a band, and each seed, or a few of many, as a thin line."""
        seeds = len(drawn.values)
        if seeds < 2:
            return
        self._band(ax, drawn, drawn.range, "range")
        if seeds > self.most_lines and self.examples:
            # the range is that of the oddest seeds, and a median is smoother than any of them
            self._band(ax, drawn, drawn.quantiles(*_MOST_SEEDS), "quantiles")
        lines = seeds if seeds <= self.most_lines else self.examples
        look, stroke = self.look(drawn.arm), self.seed(lines)
        for seed, values in zip(drawn.seeds[:lines], drawn.values, strict=False):
            gid = self.gid(drawn.arm, f"seed={seed}")
            draw_line(ax, drawn.steps, values, most=min(400, _POINTS // lines), gid=gid, **look, **stroke)

    def draw_median(self, ax: Axes, drawn: Bundle, underneath: bool) -> None:
        """The line that the eye should follow."""
        stroke = self.underneath if underneath else self.median
        gid = self.gid(drawn.arm, "median")
        draw_line(ax, drawn.steps, drawn.median, gid=gid, **self.look(drawn.arm), **stroke)

    def _band(self, ax: Axes, drawn: Bundle, edges: tuple[np.ndarray, np.ndarray], part: str) -> None:
        at, top = places(ax, drawn.steps), ax.get_ylim()[1]
        low, high = (np.where(np.isposinf(edge), top, edge) for edge in edges)
        kept = np.union1d(thin(at, low, self.band_points), thin(at, high, self.band_points))
        fill = self.band | {"color": self.look(drawn.arm)["color"], "gid": self.gid(drawn.arm, part)}
        ax.fill_between(drawn.steps[kept], low[kept], high[kept], linewidth=0, **fill)

    def mark_first_flips(
        self, ax: Axes, bundles: Iterable[Bundle], records: Sequence[SeedRecord], some: str
    ) -> str:
        """A dotted upright at each arm's first step with a sign flip, median over seeds; in words.

        Args:
            some: what is said of an arm that flips in {n} of {of} seeds.
        """
        said = []
        for drawn in bundles:
            steps = [s for s in first_flips(records, drawn.arm) if s is not None]
            if steps:
                middle, colour = float(np.median(steps)), self.look(drawn.arm)["color"]
                ax.axvline(middle, color=colour, gid=self.gid(drawn.arm, "flip"), **self.flip)
                rest = "" if len(steps) == len(records) else some.format(n=len(steps), of=len(records))
                said.append(f"{drawn.arm} step {middle:g}{rest}")
        return ", ".join(said)

    def mark_blow_ups(self, ax: Axes, drawn: Bundle) -> int:
        """A cross where a seed had its last finite value; how many there are."""
        ends = drawn.last_finite
        ends = ends[:: math.ceil(len(ends) / CROSSES) or 1]
        top = ax.get_ylim()[1] if self.on_axis else math.inf
        style = self.cross | {"marker": "x", "linestyle": "", "color": self.look(drawn.arm)["color"]}
        heights, gid = [min(value, top) for _, value in ends], self.gid(drawn.arm, "end")
        ax.plot([step for step, _ in ends], heights, gid=gid, clip_on=False, **style)
        return len(ends)


def draw_line(ax: Axes, steps: np.ndarray, values: np.ndarray, most: int = 400, **style: object) -> None:
    """Of no more than ``most`` points; a gap where a value is not finite."""
    kept = thin(places(ax, steps), values, most)
    ax.plot(steps[kept], np.where(np.isfinite(values[kept]), values[kept], np.nan), **style)


def blown_up(drawn: Bundle) -> int:
    """How many seeds were not finite to their end."""
    return int(np.isinf(drawn.values).any(axis=1).sum())


def bottom_up(bundles: Iterable[Bundle]) -> list[Bundle]:
    return sorted(bundles, key=lambda b: _LAYERS.get(role(b.arm), 0))
