"""The words that table, figure and answer share."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig


def listed(rates: Sequence[float]) -> str:
    """3, 6 and 9"""
    words = [f"{rate:g}" for rate in rates]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def p_value(p: float) -> str:
    return "p = 1" if p > 0.995 else f"p = {p:.2g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def names(settings: DictConfig) -> dict[str, str]:
    """The functions that make candidate and bug."""
    targets = {"candidate": settings.rewrite.target, "bug": settings.bug.target}
    return {arm: target.rpartition(".")[2] for arm, target in targets.items()}


def seeds(n: int) -> str:
    return f"{n} seed{'s' * (n != 1)}"
