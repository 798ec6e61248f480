"""What all seeds of ``batch_size`` say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

Values = Mapping[int, dict]
NORM_NAMES = {"batch": "BatchNorm", "identity": "Identity"}


def sweeps_of(values: Values, norm: str, arithmetic: str, inputs: str) -> list[dict]:
    """Of each seed the one sweep."""
    asked = (norm, arithmetic, inputs)
    return [
        s
        for value in values.values()
        for s in value["sweeps"]
        if (s["norm"], s["arithmetic"], s["inputs"]) == asked
    ]


def sweep_keys(values: Values) -> list[tuple[str, str, str]]:
    """Norm, arithmetic and inputs of each sweep, in the order in which they were measured."""
    first = next(iter(values.values()))
    return [(s["norm"], s["arithmetic"], s["inputs"]) for s in first["sweeps"]]


def arithmetic_names(values: Values) -> tuple[str, ...]:
    """float32, float64 and TF32, which may be emulated."""
    return tuple(dict.fromkeys(arithmetic for _, arithmetic, _ in sweep_keys(values)))


def tf32_name(values: Values) -> str:
    return arithmetic_names(values)[-1]


def largest(sweeps: Iterable[dict], depth: int, what: str = "difference") -> float:
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


def power(ratio: float) -> str:
    """A ratio as a power of two, or 0."""
    return f"2^{math.log2(ratio):.1f}" if ratio > 0 else "0"


def ulp(value: float, arithmetic: str) -> float:
    """The unit in the last place of float32 or float64 at ``value``."""
    _, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - (53 if arithmetic == "float64" else 24))


def counted(number: int, noun: str) -> str:
    """As in "1 row", "2 rows"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def seeds_in_words(values: Values) -> str:
    return counted(len(values), "seed")
