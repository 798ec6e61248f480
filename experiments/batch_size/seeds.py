"""What all seeds of ``batch_size`` say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from suite.showing.wording import Rows, Values, all_rows, first_of

NORM_NAMES = {"batch": "BatchNorm", "identity": "Identity"}


def sweeps_of(values: Values, norm: str, arithmetic: str, inputs: str) -> Rows:
    """Of each seed the one sweep."""
    return all_rows(values, "sweeps", norm=norm, arithmetic=arithmetic, inputs=inputs)


def arithmetic_names(values: Values) -> tuple[str, ...]:
    """float32, float64 and TF32, which may be emulated."""
    return tuple(dict.fromkeys(sweep["arithmetic"] for sweep in first_of(values)["sweeps"]))


def tf32_name(values: Values) -> str:
    return arithmetic_names(values)[-1]


def largest(sweeps: Rows, depth: int, what: str = "difference") -> float:
    """Over all seeds, at one depth; -1 is the deepest."""
    return max(s["depths"][depth][what] for s in sweeps)


def largest_of(
    values: Values, norm: str, arithmetic: str, depth: int = -1, what: str = "difference"
) -> float:
    """Over all seeds and both kinds of inputs, absolute.

    Args:
        what: "difference" over all batch sizes tried, "common" over those that every sweep has.
    """
    return max(largest(sweeps_of(values, norm, arithmetic, i), depth, what) for i in ("zeros", "random"))


def size_ranges(sizes: Sequence[int], marks: Sequence[object]) -> list[tuple[str, list[int]]]:
    """Neighbouring sizes with the same mark: "2 to 15" and their positions in ``sizes``."""
    found = []
    for _, group in groupby(range(len(sizes)), key=lambda i: marks[i]):
        positions = list(group)
        first, last = sizes[positions[0]], sizes[positions[-1]]
        found.append((f"{first}" if first == last else f"{first} to {last}", positions))
    return found


def in_ranges(sizes: Sequence[int], wanted: Callable[[int], bool]) -> str:
    """Those of ``sizes`` that are wanted, neighbours in the list drawn together: "2 to 15, 64"."""
    parts = size_ranges(sizes, [wanted(size) for size in sizes])
    return ", ".join(text for text, positions in parts if wanted(sizes[positions[0]]))


def ulp(value: float, arithmetic: str) -> float:
    """The unit in the last place at ``value``, of float32 where the arithmetic is not float64."""
    return math.ldexp(1.0, math.frexp(value)[1] - (53 if arithmetic == "float64" else 24))
