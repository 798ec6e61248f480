"""``float64_steps=auto``: how many a seed takes, chosen once an experiment and taken by all of its seeds.

How many fit depends on the machine: ``suite.running.chosen`` says where the number stands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from suite.command.configuration import ALL_FLOAT64_STEPS, AUTO, digest, with_float64_steps
from suite.running.chosen import Chosen


def as_begun(settings: DictConfig, say: Callable[[str], None]) -> DictConfig:
    """``scale=full`` with the number of before there was ``auto``, where it was begun with that."""
    if not settings.float64_steps == settings.scale.float64_steps == AUTO:
        return settings
    before = with_float64_steps(settings, ALL_FLOAT64_STEPS)
    folder = Path(settings.results) / settings.name / digest(before)
    if not os.path.exists(folder / "experiment.yaml"):
        return settings
    say(f"float64_steps={before.float64_steps}: so this experiment was begun in {folder}")
    return before


def _is_number(steps: object) -> bool:
    return isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1


NUMBER = Chosen("float64_steps", setting="float64_steps", field="choice", is_one=_is_number)
