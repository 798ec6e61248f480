"""What a run is about to do, said before it starts, and how long that should take."""

from __future__ import annotations

import copy
import math
import time

from omegaconf import DictConfig

from driftlab.arm import DTYPES, Arm
from driftlab.lockstep import Lockstep, cast
from experiments.data.images import Images
from experiments.seeds import format_seeds


def plan_lines(
    settings: DictConfig,
    images: Images,
    seeds: list[int],
    todo: list[int],
    lockstep: Lockstep,
    duration: float,
) -> dict[str, str]:
    """Name -> text, one line each."""
    done = f", {len(seeds) - len(todo)} done already" if len(todo) < len(seeds) else ""
    lines = {
        "asks": settings.hypothesis or f"is the {settings.subject} the same function as its reference?",
        "arms": ", ".join(arm.name for arm in lockstep.arms),
        "seeds": f"{format_seeds(seeds)}{done}{at_a_time(settings, todo)}",
        "steps": _steps(lockstep) + f" of batch {settings.batch_size}",
        "network": f"{_network(settings)}, {_parameters(lockstep.arms[0]):,} parameters, {settings.device}",
        **plan_of_data(images),
        "scale": f"{settings.scale.name} ({settings.scale.get('why', 'as asked')})",
        "takes": _time(duration * math.ceil(len(todo) / settings.workers)),
    }
    return lines


def plan_of_data(images: Images | None) -> dict[str, str]:
    """The line on the data set, where there is one."""
    if images is None:
        return {}
    line = f"{images.name} ({images.source})"
    return {"data": f"STAND-IN {line}: drawn shapes, not photographs" if images.stand_in else line}


def at_a_time(settings: DictConfig, todo: list[int]) -> str:
    """How many seeds run side by side and with how many threads, where that is worth a word."""
    together, threads = min(settings.workers, len(todo)), settings.threads
    if together < 2:
        return ""
    return f", {together} at a time" + (f", {threads} thread{'s' * (threads > 1)} each" if threads else "")


def seconds_per_seed(lockstep: Lockstep, inputs: object, targets: object, eval_images: int) -> float:
    """How long a seed should take, from a timed step of reference and candidate in each dtype, on copies.

    Evaluation costs about a third of a step for each batch of images; logging and writing a tenth in all.
    """
    total, batch = 0.0, len(targets)
    timed: dict[str, float] = {}
    for arm in lockstep.arms:
        step = timed.get(f"reference.{arm.dtype}") if arm.role == "control" else None
        timed[arm.name] = step or _timed_step(lockstep, arm, inputs, targets)
        total += timed[arm.name] * (arm.horizon + 1 + eval_images / batch / 3)
    return 1.1 * total


def _timed_step(lockstep: Lockstep, arm: Arm, inputs: object, targets: object) -> float:
    module = copy.deepcopy(arm.module)
    for _ in range(2):  # the first call warms up
        began = time.perf_counter()
        loss = lockstep.loss(module(cast(inputs, DTYPES[arm.dtype])), targets)
        loss.backward()
        float(loss.detach())  # waits for a GPU
    return time.perf_counter() - began


def _steps(lockstep: Lockstep) -> str:
    horizons = {arm.dtype: arm.horizon for arm in lockstep.arms}
    if len(set(horizons.values())) == 1:
        return str(lockstep.steps)
    return ", ".join(f"{steps} in {dtype}" for dtype, steps in horizons.items())


def _network(settings: DictConfig) -> str:
    name = str(settings.model.get("_target_", "")).rpartition(".")[2]
    return f"{name} of width {settings.model.width}" if "width" in settings.model else name


def _parameters(arm: Arm) -> int:
    return sum(p.numel() for p in arm.module.parameters())


def _time(duration: float) -> str:
    if duration < 1:
        return "a moment"
    if duration < 100:
        return f"about {duration:.0f} s"
    return f"about {duration / 60:.0f} min" if duration < 6000 else f"about {duration / 3600:.1f} h"
