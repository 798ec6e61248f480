"""The page of ``growth.py``: a table an axis, one figure, and where growth is not linear, why."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator

from driftlab.glossary import PUBLISHED_NOTE
from driftlab.record.environment import device_name, environment
from driftlab.record.files import write_whole
from driftlab.report.sections import Answer, Figure, Look, Table
from suite.reading.judging import write_shown
from suite.reading.publishing import sections
from suite.showing.wording import Column, counted, grouped, listed, spread, table

COLUMNS = ("axis", "point", "repeat", "seconds", "steps", "probes", "memory", "disk", "machine")
WORDS = ("axis", "machine")
KINDS = {"seconds": "processor time (s)", "memory": "peak memory (MiB)", "disk": "on disk (MiB)"}
# Why an axis does not grow as a straight line through the origin; how far it does is in the table.
WHY = {
    "width": "Parameters grow with the square of the width, and so do checkpoints on disk and the work of a "
    "convolution. At small widths a step is calls and memory traffic more than arithmetic, so its time "
    "grows more slowly there.",
    "steps": "What does not depend on the steps (imports, probes, evaluations, the page) is paid once. "
    "Only so many steps for each factor of ten leave a row, and a checkpoint replaces the one before it: "
    "memory and disk stay.",
    "arms": "Imports, probes and the page are paid once. The arms differ: a float64 step takes several times "
    "a float32 step, and so does autocast where the processor has no fast 16-bit convolutions.",
    "candidates": "The reference and its controls are trained once for all. Each candidate is probed by "
    "itself, which in so short a run (20 steps) is most of what it adds. And the candidates differ: a split "
    "in eight parts is several times as slow as one in two.",
    "seeds judged": "Starting Python and reading the settings is paid once. Above 100 seeds the page shows "
    "bands instead of lines, so it takes less time to draw and is smaller.",
}


def write(file: Path, rows: Iterable[dict]) -> None:
    text = io.StringIO()
    lines = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    write_whole(file, text.getvalue())


def read(file: Path) -> list[dict]:
    """What ``write`` wrote; a number that was not measured is None, and nothing was before the first time."""
    if not file.exists():
        return []
    rows = csv.DictReader(io.StringIO(file.read_text()))
    return [{k: v if k in WORDS else float(v) if v else None for k, v in row.items()} for row in rows]


def machine() -> str:
    """On which this runs, and with which versions."""
    import torch

    cpu = torch.device("cpu")
    versions = ", ".join(f"{name} {v}" for name, v in environment(cpu)["versions"].items() if v)
    return f"{device_name(cpu)}, one thread, {versions}"


def ratios(rows: list[dict], kind: str, point: int, of: int) -> list[float]:
    """What it came to at ``point`` over what it was at ``of``, within each repetition."""
    at = {(row["repeat"], row["point"]): row[kind] for row in rows}
    repeats = sorted({row["repeat"] for row in rows})
    return [at[r, point] / at[r, of] for r in repeats if (r, point) in at and (r, of) in at]


def exponent(rows: list[dict], kind: str, point: int) -> float | None:
    """p, where the cost has grown with the power p of the axis since the point before it; 1 is linear."""
    before = [p for p in sorted({row["point"] for row in rows}) if p < point]
    if not before:
        return None
    return math.log(median(ratios(rows, kind, point, before[-1]))) / math.log(point / before[-1])


def axis_table(axis: str, rows: list[dict]) -> Table:
    first = min(row["point"] for row in rows)
    by_point = grouped(rows, "point")

    def cells(kind: str) -> Iterable[Column]:
        name = kind if kind != "seconds" else "time"
        yield Column(kind, KINDS[kind], lambda group: spread([row[kind] for row in group], _number))
        yield Column(
            f"{kind}_times",
            f"{name}: times the first",
            lambda group: spread(ratios(rows, kind, group[0]["point"], first), _number),
        )
        yield Column(
            f"{kind}_power", f"{name}: power since the last", lambda g: exponent(rows, kind, g[0]["point"])
        )

    share = [
        Column(part, f"{part} (share of the time)", partial(_share, part))
        for part in ("steps", "probes")
        if rows[0][part] is not None
    ]
    columns = [Column("point", axis, lambda group: int(group[0]["point"])), Column("n", "n", len), *share]
    columns += [column for kind in KINDS for column in cells(kind)]
    return table(axis.replace(" ", "_"), f"Over {axis}", by_point.values(), columns, WHY[axis])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(part: str, group: list[dict]) -> float:
    return median(row[part] / row["seconds"] for row in group)


def figure(by_axis: dict[str, list[dict]]) -> Figure:
    caption = "Over the first point of each axis, in the same repetition: median and range. Dotted: linear."
    return Figure("growth", "How time, memory and disk grow", partial(_draw, by_axis), caption, aspect=1.5)


def _draw(by_axis: dict[str, list[dict]], canvas: Canvas, look: Look) -> None:
    grid = canvas.subplots(math.ceil(len(by_axis) / 2), 2, squeeze=False).flat
    canvas.subplots_adjust(top=0.96, bottom=0.06, left=0.13, right=0.97, hspace=0.35, wspace=0.3)
    for ax, (axis, rows) in zip(grid, by_axis.items(), strict=False):
        _draw_axis(rows, axis, ax, look)
    for ax in list(canvas.axes)[len(by_axis) :]:
        ax.remove()
    canvas.axes[0].legend(frameon=False, fontsize="small", loc="upper left")


def _draw_axis(rows: list[dict], axis: str, ax: Axes, look: Look) -> None:
    points = sorted({row["point"] for row in rows})
    ax.plot(points, [p / points[0] for p in points], color=look.ink, linestyle=":", linewidth=0.8)
    for kind, colour, marker in zip(KINDS, look.series, "osD", strict=False):
        found = [ratios(rows, kind, point, points[0]) for point in points]
        low, middle, high = ([of(f) for f in found] for of in (min, median, max))
        ax.plot(points, middle, color=colour, marker=marker, markersize=3.5, label=KINDS[kind].split(" (")[0])
        ax.fill_between(points, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(axis)
    ax.set_ylabel("times the first point")
    ax.set_xticks(points, [f"{int(point):,}" for point in points], rotation=30, fontsize="small")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.tick_params(axis="y", labelsize="small")
    ax.minorticks_off()


def publish(page: Path, rows: list[dict]) -> None:
    found = grouped(rows, "axis")
    by_axis = {axis: found[axis] for axis in WHY if axis in found}
    answer = Answer("", [axis_table(*item) for item in by_axis.items()], [figure(by_axis)])
    shown = write_shown(page, answer)
    write_whole(page / "README.md", "\n".join([*_opening(by_axis), *sections(shown, page), *_made(rows)]))


def _opening(by_axis: dict[str, list[dict]]) -> Iterable[str]:
    yield "# How the cost of a run grows\n"
    yield f"{PUBLISHED_NOTE}\n"
    yield (
        "**Asked.** What does a run cost in time, memory and disk as it gets wider and longer, and has more "
        "arms, candidates and seeds? Where is that not linear, and why?\n"
    )
    yield "**Found.** From the first point of each axis to its last:\n"
    for axis, rows in by_axis.items():
        points = [int(row["point"]) for row in rows]
        first, last = min(points), max(points)
        grown = [
            f"{name.split(' (')[0]} {spread(ratios(rows, kind, last, first), _number)} times"
            for kind, name in KINDS.items()
        ]
        yield f"- {axis} {first:,} to {last:,} ({_number(last / first)} times): {listed(grown)}."
    repeats = len({row["repeat"] for row in rows})
    yield (
        f"\n**How sure.** Median, and range in brackets, of {counted(repeats, 'repetition')} on one machine. "
        "A ratio is taken within a repetition. Other processors have other ratios of float64 to float32.\n"
    )


def _made(rows: list[dict]) -> Iterable[str]:
    yield "## How it was made\n"
    yield "```\npython scripts/growth.py\n```\n"
    machines = listed(dict.fromkeys(row["machine"] for row in rows))
    yield f"{machines}. Every measurement: [measured.csv](measured.csv).\n"
