"""How far each pair of modules is apart, by pass, over seeds (``layers`` of ``run.json``), and its figure.

A row a pair of modules, a mark a pass; filled: without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from driftlab.record.seed_record import SeedRecord
from driftlab.report.axes import power
from driftlab.report.svg import GRID, SERIES, WIDTH, arm_id, inline_svg, new_figure, style

_MARKERS = ("o", "<", "s", "D", "v")
_FLOOR, _TOP = 1e-19, 10.0
_ROW, _MARGINS = 24, (10, 46)
_LEFT, _RIGHT = 0.34, 0.97
# The axis from left to right, in pixels of the SVG.
BOX = [_LEFT * WIDTH, _RIGHT * WIDTH]
# Letters of a module's name that fit beside its row.
_NAME = 19
# As float32 computes it, and with the rounding taken away.
KINDS = ("float32", "exact")


@dataclass(frozen=True)
class Layer:
    """One pair of modules over seeds.

    Attributes:
        values: pass -> kind (``float32``, ``exact`` and what rounding explains of each) -> a value a seed.
    """

    module: str
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def middle(self, pass_: str, kind: str) -> float | None:
        values = self.values.get(pass_, {}).get(kind)
        return median(values) if values else None

    def beyond(self, pass_: str) -> bool:
        """Whether rounding explains the difference in no more than half of the seeds."""
        return self._times_explained(pass_, "exact") > 1

    def narrow(self, pass_: str) -> bool:
        """Whether float32 is less exact than its rounding explains, in more than half of the seeds."""
        return self._times_explained(pass_, "float32") > 1 and not self.beyond(pass_)

    def unknown(self, pass_: str) -> bool:
        """Whether it differs, and does not run with the rounding taken away."""
        return bool(self.middle(pass_, "float32")) and self.middle(pass_, "exact") is None

    @property
    def rank(self) -> float:
        """How far beyond what rounding explains its worst pass is, by any kind."""
        return max((self._times_explained(p, kind) for p in self.values for kind in KINDS), default=0.0)

    def _times_explained(self, pass_: str, kind: str) -> float:
        """The difference in units of what rounding explains; 0 where there is none, or nothing to say."""
        found, explained = self.middle(pass_, kind), self.middle(pass_, f"{kind}_explained")
        if not found or explained is None:
            return 0.0
        return found / explained if explained else math.inf

    @property
    def differs(self) -> bool:
        return any(v > 0 for kinds in self.values.values() for k in KINDS for v in kinds.get(k, []))


def layers_over_seeds(records: Sequence[SeedRecord]) -> list[Layer]:
    """In the order of the forward pass; empty where nothing was compared."""
    layers: dict[str, Layer] = {}
    for record in records:
        for entry in record.run.get("layers") or []:
            layer = layers.setdefault(entry["module"], Layer(entry["module"]))
            for pass_, kinds in entry["passes"].items():
                into = layer.values.setdefault(pass_, {})
                for kind, value in kinds.items():
                    if value is not None:
                        into.setdefault(kind, []).append(float(value))  # JSON holds inf as "inf"
    return list(layers.values())


def switch(pass_: str) -> str:
    """The value by which the page switches a pass off."""
    return pass_.replace(" ", "-")


def draw(layers: list[Layer], passes: list[str]) -> tuple[Markup, list[float]]:
    """The figure, and where each row stands in it (pixels from the top)."""
    top, bottom = _MARGINS
    height = top + bottom + max(_ROW * len(layers), 60)
    with style("layers"):
        figure = new_figure(height)
        figure.subplots_adjust(left=_LEFT, right=_RIGHT, top=1 - top / height, bottom=bottom / height)
        ax = figure.subplots()
        _set_axes(ax, layers)
        for index, pass_ in enumerate(passes):
            offset = (index - (len(passes) - 1) / 2) * 0.9 / len(passes)
            _draw_pass(ax, layers, pass_, index, offset, 0.45 / len(passes))
        svg = inline_svg(figure, "layers", "difference of each pair of modules, by pass")
    step = (height - top - bottom) / len(layers)
    return svg, [round(top + (i + 0.5) * step, 1) for i in range(len(layers))]


def _set_axes(ax: Axes, layers: list[Layer]) -> None:
    ax.set_xscale("symlog", linthresh=_FLOOR * 10, linscale=0.5)
    ax.set_xlim(0, _TOP)
    ax.xaxis.set_major_locator(FixedLocator([0, *(10.0**n for n in range(-16, 1, 4))]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: power(10, v) if v else "0"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("‖Δ‖₂ / ‖reference‖₂ (relative)")
    ax.set_ylim(len(layers) - 0.5, -0.5)
    ax.set_yticks(range(len(layers)), [_short(layer.module) for layer in layers])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    for place in range(1, len(layers)):
        ax.axhline(place - 0.5, color=GRID, linewidth=0.6)


def _short(name: str) -> str:
    """Its end: the beginning is what the names of a network share."""
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def _draw_pass(ax: Axes, layers: list[Layer], pass_: str, index: int, offset: float, half: float) -> None:
    """The sub-row of a pass: what was measured, and where what rounding explains ends."""
    colour = SERIES[index % len(SERIES)]
    for kind, line in (("float32", (0, (1, 1))), ("exact", "-")):
        rows = [y for y, layer in enumerate(layers) if layer.middle(pass_, kind) is not None]
        ends = [(y + offset, layers[y].middle(pass_, f"{kind}_explained")) for y in rows]
        ends = [(y, e) for y, e in ends if e and math.isfinite(e)]
        upright = {"color": colour, "linewidth": 1.4, "linestyle": line, "gid": arm_id(switch(pass_), "end")}
        ax.vlines([e for _, e in ends], [y - half for y, _ in ends], [y + half for y, _ in ends], **upright)
        values = [layers[y].values[pass_][kind] for y in rows]
        _draw_marks(ax, [y + offset for y in rows], values, pass_, kind, index)


def _draw_marks(
    ax: Axes, heights: list[float], values: list[list[float]], pass_: str, kind: str, index: int
) -> None:
    """Medians over seeds as marks, hollow of float32, on bars from the least to the greatest."""
    colour, gid = SERIES[index % len(SERIES)], arm_id(switch(pass_), kind)
    low, middle, high = ([min(reduce(v), _TOP) for v in values] for reduce in (min, median, max))
    ax.hlines(heights, low, high, color=colour, linewidth=1, alpha=0.5, gid=gid)
    mark = {"marker": _MARKERS[index], "markersize": 5.5, "markeredgewidth": 1.1, "linestyle": ""}
    fill = "none" if kind == "float32" else colour
    ax.plot(middle, heights, color=colour, markerfacecolor=fill, clip_on=False, gid=gid, **mark)
