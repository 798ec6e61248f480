"""What a run is about to do, said before it starts, and how long that should take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from driftlab.words import counted
from suite.command.configuration import steps_in
from suite.command.seeds import format_seeds
from suite.data.samples import DataSet

if TYPE_CHECKING:
    from suite.running.costs import Sketch
    from suite.running.experiment_folder import Experiment


def training_plan(
    experiment: Experiment, seeds: list[int], todo: list[int], sketch: Sketch, duration: float
) -> dict[str, str]:
    """Name -> text, one line each; ``duration`` in seconds, of all that is to be done."""
    settings, data_set = experiment.settings, experiment.data_set
    return {
        "asks": settings.hypothesis or f"is the {settings.subject} the same function as its reference?",
        "arms": ", ".join(sketch.arms),
        "seeds": _seeds(settings, seeds, todo),
        "steps": _steps(experiment),
        "local windows": _windows(experiment),
        "network": f"{_network(settings)}, {sketch.parameters:,} parameters, {settings.device}",
        "data": _data(data_set),
        "scale": _scale(settings),
        "takes": _time(duration) if todo else "a moment",
    }


def question_plan(experiment: Experiment, about: str, seeds: list[int], todo: list[int]) -> dict[str, str]:
    """As ``training_plan``; ``about`` says what is measured."""
    settings, data_set = experiment.settings, experiment.data_set
    lines = {
        "asks": settings.hypothesis,
        "measures": about,
        "seeds": _seeds(settings, seeds, todo),
        "device": settings.device,
        "scale": _scale(settings),
    }
    return lines if data_set is None else lines | {"data": _data(data_set)}


def _data(data_set: DataSet) -> str:
    line = f"{data_set.name} ({data_set.source})"
    return f"STAND-IN {line}: drawn shapes, not photographs" if data_set.stand_in else line


def _scale(settings: DictConfig) -> str:
    return f"{settings.scale.name} ({settings.scale.get('why', 'as asked')})"


def _seeds(settings: DictConfig, seeds: list[int], todo: list[int]) -> str:
    """Which; how many run side by side and with how many threads, where that is worth a word."""
    done = f", {len(seeds) - len(todo)} done already" if len(todo) < len(seeds) else ""
    together, threads = min(settings.workers, len(todo)), settings.threads
    if together < 2:
        return f"{format_seeds(seeds)}{done}"
    each = f", {counted(threads, 'thread')} each" if threads else ""
    return f"{format_seeds(seeds)}{done}, {together} at a time{each}"


def _steps(experiment: Experiment) -> str:
    settings, choice = experiment.settings, experiment.choice
    steps = {dtype: steps_in(settings, dtype) for dtype in settings.dtypes}
    if len(set(steps.values())) == 1:
        text = str(steps[settings.dtypes[0]])
    else:
        text = ", ".join(f"{count} in {dtype}" for dtype, count in steps.items())
    return f"{text} of batch {settings.batch_size}" + (f" (float64: {choice['why']})" if choice else "")


def _windows(experiment: Experiment) -> str:
    begins, choice = experiment.settings.local.windows, experiment.windows
    at = f"from steps {', '.join(map(str, begins))}" if begins and begins != "auto" else "none"
    return f"{at} ({choice['why']})" if choice else at


def _network(settings: DictConfig) -> str:
    name = str(settings.model.get("_target_", "")).rpartition(".")[2]
    return f"{name} of width {settings.model.width}" if "width" in settings.model else name


def _time(duration: float) -> str:
    """At least: nobody knows before whether curves leave their controls and are looked at again."""
    if duration < 100:
        return f"at least {duration:.0f} s"
    return f"at least {duration / 60:.0f} min" if duration < 6000 else f"at least {duration / 3600:.1f} h"
