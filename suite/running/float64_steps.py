"""``float64_steps=auto``: how many a seed takes, chosen once an experiment and taken by all of its seeds.

How many fit depends on the machine: ``suite.running.chosen`` says where the number stands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from driftlab.record.files import write_whole
from suite.command.configuration import ALL_FLOAT64_STEPS, AUTO, digest, with_float64_steps
from suite.command.errors import storage
from suite.reading.stored import as_yaml
from suite.running import chosen

if TYPE_CHECKING:
    from suite.running.experiment_folder import Experiment

NAME = "float64_steps"


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


def read_choice(folder: Path) -> dict | None:
    """What was chosen for the experiment in ``folder``; None where nobody has chosen yet.

    Raises:
        ConfigurationError: it is damaged: its seeds' ``run.json`` say it too.
    """
    return chosen.read_choice(folder, NAME, _is_number)


def settle(experiment: Experiment, choice: dict) -> Experiment:
    """The experiment with the number that stands in its folder: that of ``choice``, if it comes first.

    Raises:
        Unfinished: the disk refuses the file.
    """
    settings, folder = experiment.settings, experiment.folder
    with storage(settings.results, lambda: "no seed was begun"):
        choice = chosen.first_of_all(folder, NAME, choice, _is_number)
        settings = with_choice(settings, choice)
        write_whole(folder / "experiment.yaml", as_yaml(settings))
    return replace(experiment, settings=settings, choice=choice)


def _is_number(steps: object) -> bool:
    return isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1


def with_choice(settings: DictConfig, choice: dict) -> DictConfig:
    settings = settings.copy()
    settings.float64_steps = choice["float64_steps"]
    return settings
