"""The per-layer picture: how far each pair of modules is apart when fed the reference's exact inputs.

Two marks a layer and pass: hollow as float32 computes it, filled with the rounding taken away. Rounding
shrinks between the two by 2^-29, a difference in the function stays where it is. A line each for the largest
difference that rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from driftlab.record.seed_record import SeedRecord
from driftlab.report.layer_figure import BOX, KINDS, Layer, draw, layers_over_seeds, switch
from driftlab.report.sections import number

# Always drawn; the others (buffer, eval) where they differ by more than rounding.
PASSES = ("forward", "input gradient", "weight gradient")
# Room for a page: of more layers those are drawn that rounding explains least.
MOST_ROWS = 60


@dataclass(frozen=True)
class LayerPicture:
    """Ready for the page: the figure (None where no bit differs anywhere), its words and its numbers."""

    svg: Markup | None
    passes: list[str]
    sentence: str
    caption: list[str]
    rows: list[dict]
    readings: dict

    @property
    def switches(self) -> list[str]:
        return [switch(p) for p in self.passes]


def layer_picture(records: Sequence[SeedRecord]) -> LayerPicture | None:
    """Of the ``layers`` in ``run.json``; None where no seed has any."""
    layers = layers_over_seeds(records)
    if not layers:
        return None
    differing = [layer for layer in layers if layer.differs]
    worst = sorted(differing, key=lambda layer: -layer.rank)[:MOST_ROWS]
    drawn = [layer for layer in differing if layer in worst]
    passes = list(PASSES) + sorted(
        {p for layer in drawn for p in layer.values if p not in PASSES and layer.beyond(p)}
    )
    svg, places = draw(drawn, passes) if drawn else (None, [])
    rows = [_row(layer, passes) for layer in drawn]
    shown = _readings(drawn, passes, places)
    seeds = sum(bool(r.run.get("layers")) for r in records)
    caption = _caption(seeds, len(differing), len(drawn))
    return LayerPicture(svg, passes, _sentence(layers, passes), caption, rows, shown)


def _sentence(layers: list[Layer], passes: list[str]) -> str:
    compared = [layer for layer in layers if layer.values]
    said = [f"{len(compared)} of {len(layers)} pairs of modules were compared"]
    if len(compared) < len(layers):
        said[0] += "; the others are the same code with the same settings, or take other arguments"
    differing = [layer for layer in compared if layer.differs]
    if len(differing) < len(compared):
        said.append(f"{len(compared) - len(differing)} agree in every bit")
    found = [_first(differing, passes, Layer.beyond, "the difference is more than rounding explains")]
    found += [_first(differing, passes, Layer.narrow, "float32 is less exact than its rounding explains")]
    if any(found):
        said += filter(None, found)
    elif any(layer.unknown(p) for layer in differing for p in passes):
        said.append(
            "Not all of it runs with the rounding taken away, so this cannot tell whether it is rounding"
        )
    elif differing:
        said.append("Rounding explains all that differs")
    return f"{'. '.join(said)}."


def _first(
    layers: list[Layer], passes: list[str], is_so: Callable[[Layer, str], bool], what: str
) -> str | None:
    found = [(layer.module, p) for layer in layers for p in passes if is_so(layer, p)]
    if not found:
        return None
    module, pass_ = found[0]
    count = len({module for module, _ in found})
    return f"In {count} {what}, first in the order of the forward pass in {module} ({pass_})"


def _caption(seeds: int, differing: int, drawn: int) -> list[str]:
    caption = [
        "Before any update, each module fed the reference's exact inputs and output gradients; from top to",
        "bottom the order of the forward pass. Hollow: as float32 computes it; filled: with the rounding",
        "taken away. Uprights: the largest difference that rounding explains, dotted as float32 computes it,",
        "solid with the rounding taken away; a filled mark to the right of its solid upright is no rounding.",
        "Exactly 0 stands on the left.",
    ]
    if seeds > 1:
        caption.append(f"Medians of {seeds} seeds; bars: from the least to the greatest.")
    if drawn < differing:
        caption.append(f"The {drawn} of {differing} differing pairs that rounding explains least.")
    return caption


def _row(layer: Layer, passes: list[str]) -> dict:
    """For the table of numbers: of each pass both kinds, and whether it is beyond rounding."""
    cells = [{"text": _cell(layer, p), "bad": layer.beyond(p)} for p in passes]
    return {"module": layer.module, "cells": cells}


def _cell(layer: Layer, pass_: str) -> str:
    computed, exact = (layer.middle(pass_, kind) for kind in KINDS)
    return number(computed) if exact is None else f"{number(computed)}; {number(exact)}"


def _readings(layers: list[Layer], passes: list[str], places: list[float]) -> dict:
    arms = {switch(p): {"median": [_cell(layer, p) for layer in layers]} for p in passes}
    return {
        "axis": "module",
        "at": [layer.module for layer in layers],
        "place": places,
        "box": BOX,
        "arms": arms,
    }
