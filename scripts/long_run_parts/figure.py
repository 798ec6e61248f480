"""The figure of a long run: growth and excess in its windows, free-running drift in both dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from driftlab.report.sections import Figure, Look
from driftlab.rounding import HALFWAY
from scripts.long_run_parts.rules import CONTROLS, Network, distances, grown, times
from scripts.long_run_parts.words import ADDED_UP


def figure(networks: Sequence[Network]) -> Figure:
    caption = (
        "(a) Growth of the control's distance an update, in windows of six updates from equal weights "
        "(float64 drawn through, float32 dashed); shaded: what rounding that only adds up shows. "
        "(b) Candidate over its controls in these windows, float64; dotted: HALFWAY. (c) Free-running "
        "float64 and (d) float32: weight distance from the reference. Lines: medians over seeds; bands: "
        "their range. Upright: where a fault sets in."
    )
    return Figure(
        "long_run",
        "A long training, and two faults on its way",
        partial(_draw, networks),
        caption,
        aspect=0.8,
    )


def _draw(networks: Sequence[Network], canvas: Canvas, look: Look) -> None:
    axes = canvas.subplots(2, 2).flat
    canvas.subplots_adjust(top=0.86, bottom=0.09, left=0.1, right=0.98, hspace=0.32, wspace=0.26)
    names = ["control", *(n.words.removeprefix("right rewrite: ") for n in networks)]
    colours = dict(zip(names, look.series, strict=False))
    a, b, c, d = axes
    a.axhspan(ADDED_UP**0.5, ADDED_UP, color=look.ink, alpha=0.12, linewidth=0)
    for arm, style in zip(CONTROLS, ("-", "--"), strict=True):
        _band(a, grown(networks[0], arm), colours["control"], style)
    for n, name in zip(networks, names[1:], strict=True):
        _band(b, times(n), colours[name], "-", floor=1e-3)
    b.axhline(HALFWAY, color=look.ink, linestyle=":", linewidth=0.8)
    for ax, dtype in ((c, "float64"), (d, "float32")):
        _band(ax, distances(networks[0], f"control.{dtype}"), colours["control"], "-")
        for n, name in zip(networks, names[1:], strict=True):
            _band(ax, distances(n, f"candidate.{dtype}"), colours[name], "-")
    for ax, title in zip(
        (a, b, c, d),
        (
            "(a) growth an update",
            "(b) times the controls",
            "(c) float64, free-running",
            "(d) float32, free-running",
        ),
        strict=True,
    ):
        ax.set_title(title, fontsize="small", loc="left")
        ax.set_xscale("log")
        for n, name in zip(networks, names[1:], strict=True):
            if n.begins is not None and ax is not a:
                ax.axvline(n.begins, color=colours[name], linestyle=":", linewidth=0.8)
    for ax in (b, c, d):
        ax.set_yscale("log")
    for ax in (c, d):
        ax.set_xlabel("step")
    handles = [a.plot([], [], color=colours[name], label=name)[0] for name in names]
    canvas.legend(handles=handles, loc="upper center", ncols=2, frameon=False, fontsize="small")


def _band(
    ax: Axes, found: Mapping[int, Sequence[float]], colour: str, style: str, floor: float = 0.0
) -> None:
    steps = [step for step, values in found.items() if values]
    of = {take: [max(take(found[s]), floor) for s in steps] for take in (min, median, max)}
    ax.plot(steps, of[median], color=colour, linestyle=style, linewidth=1.3)
    ax.fill_between(steps, of[min], of[max], color=colour, alpha=0.15, linewidth=0)
