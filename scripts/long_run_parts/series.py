"""Numbers along the run, seed by seed: growth and excess in its windows, distances step by step."""

from __future__ import annotations

from collections.abc import Callable

from driftlab.along import times_the_controls
from driftlab.inquiry import Examined
from driftlab.record.local_windows import growth, windows_of
from scripts.long_run_parts.rules import Network

CONTROLS = ("control.float64", "control.float32")


def grown(network: Network, arm: str) -> dict[int, list[float]]:
    """Window -> by how much the distance of an arm grows an update, seed by seed."""
    return _by_window(network, lambda rows: growth(rows, f"weight_distance/{arm}"))


def times(network: Network) -> dict[int, list[float]]:
    return _by_window(network, lambda rows: times_the_controls(rows, Examined([])))


def _by_window(network: Network, of: Callable[[list], float | None]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for begins, rows in windows_of(record.local).items():
            found.setdefault(begins, [])
            if (value := of(rows)) is not None:
                found[begins].append(value)
    return {begins: found[begins] for begins in sorted(found)}


def distances(network: Network, arm: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for record in network.records:
        for step, value in record.series("weight_distance", arm).items():
            if step and value > 0:
                found.setdefault(step, []).append(value)
    return {step: found[step] for step in sorted(found)}
