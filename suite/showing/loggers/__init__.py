"""What a run leaves with a logger: the rows of every seed, then the verdict over all of them.

Names are those of ``curves.csv``, the axis is ``step``. ``weights_and_biases`` and ``lightning_files`` know
how each logger takes them; neither imports its library before it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig

from driftlab.record.seed_record import read_json
from driftlab.report.sections import Answer
from suite.command.errors import ConfigurationError

CHOICES = ("wandb", "tensorboard", "csv", "none")


def _library(choice: str) -> ModuleType:
    """How a logger takes a seed and a verdict, imported when it is chosen."""
    if choice == "wandb":
        from suite.showing.loggers import weights_and_biases

        return weights_and_biases
    from suite.showing.loggers import lightning_files

    return lightning_files


class MetricsLogger:
    """Hands the rows of one seed to the chosen logger.

    A seed that goes on from a checkpoint hands over all its rows again: what lay in ``home`` of this logger
    is replaced, so that it is whole and holds no step twice.

    Args:
        home: the folder of this seed.
        say: is told what the user should know, a line at a time: a server that does not take the run.

    Raises:
        ConfigurationError: the logger is unknown; with the first row, that it cannot be started.
    """

    def __init__(
        self, settings: DictConfig, digest: str, seed: int, home: Path, say: Callable[[str], None] = print
    ):
        self._choice = settings.logger.name
        if self._choice not in CHOICES:
            raise ConfigurationError(f"logger={self._choice} is unknown: choose from {', '.join(CHOICES)}")
        self._of = settings, digest, seed, home, say

    @cached_property
    def _run(self):
        """Started when the first row comes: a run that cannot start leaves none."""
        return None if self._choice == "none" else _library(self._choice).SEEDS[self._choice](*self._of)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """NaN and inf are left out: W&B turns them into strings, which then stick in its summary."""
        if self._run is not None:
            self._run.log(step, {k: v for k, v in row.items() if math.isfinite(v)})

    def finish(self, record: Mapping) -> None:
        """Close the run, with what ``run.json`` says of it: else the next seed would go on in it."""
        if self._run is not None:
            self._run.finish(record)

    def crash(self, why: str) -> None:
        """Close a run that comes to no end now; the same command goes on with it.

        One without a row yet is begun where a message can be sent of it.
        """
        if self._choice == "none":
            return
        if "_run" in vars(self) or _library(self._choice).tells_of_crashes(self._of[0]):
            self._run.crash(why)


def log_verdict(
    settings: DictConfig,
    digest: str,
    folder: Path,
    answer: Answer | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Leave the verdict over all finished seeds with the chosen logger, in place of an earlier one.

    Returns what the user should know of where the runs lie: name -> path, address or command.

    Args:
        folder: the experiment's, with ``verdict.json``, ``report.html`` and, where there are, ``figures/``.
        answer: what the experiment has to show beside its verdict, where it has.

    Raises:
        ConfigurationError: the logger cannot be started.
    """
    if settings.logger.name in ("wandb", "tensorboard"):
        verdict = read_json(folder / "verdict.json")
        return _library(settings.logger.name).log_verdict(settings, digest, folder, verdict, answer, say)
    return {}
