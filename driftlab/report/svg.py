"""matplotlib's figures as SVG that lives inside a page: its text, its colours, its ids.

matplotlib knows neither the colours of a page nor dark mode. So the figures are drawn in stand-in
colours, one for each meaning, which are replaced by ``currentColor`` and CSS variables afterwards.
"""

from __future__ import annotations

import io
import re

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

INK, GRID = "#010101", "#020202"
ROLE_COLOURS = {"reference": "#030303", "candidate": "#040404", "control": "#050505"}
SERIES = ("#060606", "#070707", "#080808", "#090909", "#0a0a0a", "#0b0b0b")
_IN_PAGE = {
    **{INK: "currentColor", GRID: "var(--grid)"},
    **{colour: f"var(--{role})" for role, colour in ROLE_COLOURS.items()},
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)},
}

WIDTH, HEIGHT = 480, 330
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched, and takes the page's font
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
}


def style(name: str):
    """The context in which a figure is made and turned into SVG; ``name`` makes its ids its own."""
    return matplotlib.rc_context(_STYLE | {"svg.hashsalt": name})


def new_figure(height: float = HEIGHT) -> Figure:
    """An empty figure of the page's size; one unit of its SVG is one CSS pixel at full width."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
    # wide margins: on a small screen the words are larger than they are drawn here
    figure.subplots_adjust(left=0.165, right=0.905, bottom=0.15, top=0.97)
    return figure


def arm_id(arm: str, part: str) -> str:
    """The gid of a drawn element: the page can then switch the arm off, or pick out a seed (``part``)."""
    return f"arm:{arm}:{part}"


def inline_svg(figure: Figure, name: str, title: str) -> Markup:
    """The figure as an ``<svg>`` element whose ids all begin with ``name``."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # its rule for * would reach the page
    text = re.sub(r'id="arm:([^":]+):([^"]*)"', r'data-arm="\1" data-part="\2"', text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
    text = re.sub(r' style="font-size: ([\d.]+)px; font-family: [^;"]*;', r' style="font-size: \1px;', text)
    text = re.sub(r'(?:\sd|\bx|\by)="[^"]*"', _round_numbers, text)
    for colour, in_page in _IN_PAGE.items():
        text = text.replace(colour, in_page)
    height = round(figure.get_figheight() * 72)
    opening = f'<svg role="img" aria-label="{Markup.escape(title)}" viewBox="0 0 {WIDTH} {height}"'
    return Markup(re.sub(r'<svg [^>]*?viewBox="[^"]*"', opening.replace("\\", ""), text, count=1))


def _round_numbers(match: re.Match) -> str:
    """A tenth of a pixel is enough, and halves the page."""
    one_line = match[0].replace("\n", "")
    return re.sub(r"-?\d+\.\d\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), one_line)


def on_paper(ink: str, grid: str):
    """Inside ``style``: the colours of a file instead of those that a page replaces."""
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    # letters as outlines: who opens the file may not have the font
    return matplotlib.rc_context(dict.fromkeys(inks, ink) | {"grid.color": grid, "svg.fonttype": "path"})


def as_bytes(figure: Figure, suffix: str, dpi: int) -> bytes:
    """As a file of that kind, without the time at which it was drawn."""
    file, no_time = io.BytesIO(), {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    figure.savefig(file, format=suffix, dpi=dpi, metadata=no_time[suffix])
    return file.getvalue()
