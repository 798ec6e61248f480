"""An experiment's settings and images as a part of the check takes them: on the GPU, drawn images."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from scripts.gpu_parts.part import Check

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from suite.data.images import Images


def settings_of(check: Check, experiment: str, *overrides: str) -> DictConfig:
    """At full scale, or at smoke's."""
    from suite.command.configuration import composed, resolve

    common = [f"scale={'smoke' if check.smoke else 'full'}", "data=shapes", "logger=none", "device=cuda"]
    return resolve(composed(f"+experiment={experiment}", *common, *overrides))


@cache
def drawn_images() -> Images:
    """They need no network."""
    from suite.data import load

    return load("shapes")
