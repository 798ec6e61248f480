"""The main curves of a run as a figure for a paper: at the width of a column, as SVG and as PNG."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from driftlab.measures import Measure, drawn_measures
from driftlab.record.seed_record import RecordError, SeedRecord, finished_seeds, read_seed, write_whole
from driftlab.report import axes as scale
from driftlab.report.lines import Medium, blown_up, bottom_up
from driftlab.report.series import Bundle, all_arms, bundles_of, judged_against, narrow, role
from driftlab.report.svg import as_bytes
from driftlab.words import counted

# Inches: a column of a two-column page, and the whole page between its margins.
WIDTHS = {"single": 3.35, "double": 6.9}
_DOTS_PER_INCH = 400
_STYLE = {
    "svg.fonttype": "path",  # letters as outlines: who typesets the paper may not have the font
    "svg.hashsalt": "driftlab",  # the same run gives the same bytes
    "font.size": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.4,
}

# In grey print lightness parts the roles; the hues are near those of Okabe and Ito ("Color Universal Design",
# 2008), which colour-blind readers tell apart.
COLOURS = {"reference": "#000000", "control": "#56b4e9", "candidate": "#c04e00"}
PAPER = Medium(
    colours=COLOURS,
    float64=(0, (3, 1.2)),
    darkened=0.5,
    most_lines=20,
    examples=0,
    seed=lambda seeds: {"linewidth": 0.35, "alpha": 0.6},
    median={"linewidth": 1.1, "alpha": 1.0},
    underneath={"linewidth": 2.6, "alpha": 0.3},
    band={"alpha": 0.15},
    flip={"linestyle": (0, (1, 1.5)), "linewidth": 0.7},
    cross={"markersize": 3.5, "markeredgewidth": 0.9},
    band_points=10_000,
    on_axis=True,
)


@dataclass(frozen=True)
class Curves:
    """A figure in files, and the sentences that belong beneath it."""

    files: list[Path]
    caption: str


def read_run(run: Path, read: Callable[[Path, int], SeedRecord | None] = read_seed) -> list[SeedRecord]:
    """The finished seeds of a run's folder, each read by ``read``.

    Raises:
        RecordError: there is none, none of them was trained, or one is damaged.
    """
    records = [r for seed in finished_seeds(run) if (r := read(run, seed)) is not None]
    if not records:
        raise RecordError(f"{run} holds no finished seed: give a folder results/runs/<experiment>/<digest>")
    if not any(record.curves for record in records):
        raise RecordError(f"{run} holds no curves: nothing was trained there; give a run that trains")
    return records


def write_curves(records: Sequence[SeedRecord], folder: Path, width: str = "single") -> Curves:
    """Write ``curves_<width>.svg`` and ``.png``: weight distance, sign flips and loss over steps.

    Args:
        records: finished seeds of one experiment, at least one of them with curves.
        folder: where the files go; made where it is missing.
        width: a key of ``WIDTHS``; panels stand above each other in a single column, else side by side.
    """
    with matplotlib.rc_context(_STYLE):
        figure, caption = _drawn(records, width)
        files = [Path(folder) / f"curves_{width}.{suffix}" for suffix in ("svg", "png")]
        for path in files:
            write_whole(path, as_bytes(figure, path.suffix[1:], _DOTS_PER_INCH))
    return Curves(files, caption)


@dataclass(frozen=True)
class _Panel:
    letter: str
    measure: Measure
    bundles: list[Bundle]


def _panels(records: Sequence[SeedRecord]) -> list[_Panel]:
    """What was measured, of the three roles; a network without kinks has no sign flips."""
    drifting = [a for a in judged_against(records) if role(a) in COLOURS]
    if any(role(a) == "candidate" for a in drifting):
        # the reference's own rounding (float32 against float64) matters where it is what was asked
        drifting = [a for a in drifting if role(a) != "reference"]
    trained = narrow([a for a in all_arms(records) if role(a) in COLOURS])
    found = [(m, bundles_of(records, m, drifting if m.compared else trained)) for m in drawn_measures()]
    lettered = zip(string.ascii_lowercase, (f for f in found if f[1]), strict=False)
    return [_Panel(letter, measure, bundles) for letter, (measure, bundles) in lettered]


def _drawn(records: Sequence[SeedRecord], width: str) -> tuple[Figure, str]:
    panels, stacked = _panels(records), width == "single"
    height = 0.45 + 1.6 * len(panels) if stacked else 2.4
    figure = Figure(figsize=(WIDTHS[width], height), facecolor="white", layout="constrained")
    places = figure.subplots(*((len(panels), 1) if stacked else (1, len(panels))), squeeze=False).flat
    last = max(int(b.steps[-1]) for p in panels for b in p.bundles)
    said = [_what_is_drawn(len(records))]
    for ax, panel in zip(places, panels, strict=True):
        said += _fill(ax, panel, records, last)
        if stacked and panel is not panels[-1]:
            ax.set_xlabel("")
    _legend(figure, panels, columns=2 if stacked else 5)
    return figure, " ".join(dict.fromkeys(said))


def _fill(ax: Axes, panel: _Panel, records: Sequence[SeedRecord], last: int) -> list[str]:
    """Draw a panel; what a reader has to be told about it."""
    ax.set_title(f"({panel.letter})", loc="left", fontsize=8)
    scale.steps(ax, last, room=False)
    if ax.get_xscale() == "linear":
        ax.locator_params(axis="x", nbins=5)  # a panel of three has no room for more
    measure, bundles = panel.measure, panel.bundles
    scaled = scale.SCALES[measure.scale](ax, bundles, measure.label.lower())
    said = [f"({panel.letter}) {s}" for s in scaled]
    # float64 over float32: a wrong function is as wrong in float64, and the two lie on each other
    for drawn in sorted(bottom_up(bundles), key=lambda b: b.arm.partition(".")[2]):
        PAPER.draw_seeds(ax, drawn)
        PAPER.draw_median(ax, drawn, underneath=not measure.compared and role(drawn.arm) == "reference")
        said += _end(ax, drawn)
    if not measure.compared:
        return said
    flips = PAPER.mark_first_flips(ax, bundles, records, some=" ({n} of {of} seeds)")
    return [*said, f"Dotted upright: first sign flip, {flips}."] if flips else said


def _end(ax: Axes, drawn: Bundle) -> list[str]:
    n, of = blown_up(drawn), len(drawn.values)
    if not n:
        return []
    PAPER.mark_blow_ups(ax, drawn)
    return [f"Cross: last finite value of {drawn.arm}, which blew up in {n} of {counted(of, 'seed')}."]


def _what_is_drawn(seeds: int) -> str:
    if seeds == 1:
        return "One seed."
    each = "thin lines, each seed; " if seeds <= PAPER.most_lines else ""
    return f"{seeds} seeds: thick lines, the median; {each}shaded, their range."


def _legend(figure: Figure, panels: Iterable[_Panel], columns: int) -> None:
    panels = list(panels)
    drifting = {b.arm for p in panels if p.measure.compared for b in p.bundles}
    lines = [
        Line2D(
            [],
            [],
            label=a.replace(".", ", "),
            **PAPER.look(a),
            **(PAPER.median if a in drifting else PAPER.underneath),
        )
        for a in dict.fromkeys(b.arm for p in panels for b in p.bundles)
    ]
    place = {"loc": "outside upper center", "ncols": min(columns, len(lines)), "frameon": False}
    figure.legend(handles=lines, handlelength=2.4, columnspacing=1.2, borderaxespad=0.2, **place)
