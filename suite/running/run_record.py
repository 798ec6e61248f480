"""What ``run.json`` says about a seed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from driftlab.lockstep.arm import Arm
from driftlab.process import said
from driftlab.record.differing import elsewhere
from driftlab.record.environment import environment, instruments
from driftlab.record.seed_record import SCHEMA
from suite.data.samples import DataSet

if TYPE_CHECKING:
    from suite.running.building import Built
    from suite.running.experiment_folder import Experiment
    from suite.running.recorder import Recorder


class Began(NamedTuple):
    """When a seed was begun: by the calendar, and by a clock that nobody sets."""

    calendar: datetime
    seconds: float

    @classmethod
    def now(cls) -> Began:
        return cls(datetime.now(UTC), time.perf_counter())


def run_record(
    experiment: Experiment, seed: int, built: Built, began: Began, recorder: Recorder, start: int
) -> dict:
    """Of a seed that was trained from step ``start`` on."""
    record = seed_record(experiment, seed, began)
    record["arms"] = {arm.name: _arm_record(arm) for arm in built.lockstep.arms}
    record["fold"] = _fold_record(built)
    record["times"]["resumed_at_step"] = start or None
    record["resumed"] = _elsewhere(recorder.parts)
    record["float64_steps"] = experiment.choice
    record["files"] = recorder.files
    return record


def _elsewhere(parts: list[dict]) -> list[dict]:
    """The steps ``from`` .. ``step`` - 1 that were made in another environment than the last ones."""
    last = parts[-1]["environment"]
    return [
        {"from": part["from"], "step": after["from"], "environment": part["environment"]}
        for part, after in pairwise(parts)
        if elsewhere(part["environment"], last)
    ]


def changed(before: object, now: object, name: str = "") -> list[str]:
    """What differs between two environments in what both record, in words: "threads 2, was 1"."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [line for key in now if key in before for line in changed(before[key], now[key], key)]
    return [] if before == now else [f"{name} {now}, was {before}"]


def seed_record(experiment: Experiment, seed: int, began: Began) -> dict:
    """What every kind of experiment says of a seed that has just finished; its arms are still missing."""
    settings = experiment.settings
    return {
        "schema": SCHEMA,
        "experiment": settings.name,
        "digest": experiment.digest,
        "seed": seed,
        "outcome": "finished",
        "command": experiment.command,
        "arms": {},
        "dataset": _dataset_record(experiment.data_set),
        "environment": environment(torch.device(settings.device)),
        "settings_changed": said(),
        "instruments": instruments(),
        "times": {
            "began": began.calendar.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - began.seconds, 3),
        },
    }


def _dataset_record(data_set: DataSet | None) -> dict:
    if data_set is None:
        return {"name": "random numbers", "sha256": None, "source": "drawn from the seed", "stand_in": False}
    return {
        "name": data_set.name,
        "sha256": data_set.sha256,
        "source": data_set.source,
        "stand_in": data_set.stand_in,
        "train_images": data_set.train_count,
        "test_images": data_set.test_count,
    }


def _arm_record(arm: Arm) -> dict:
    return {
        "outcome": "finished" if arm.blown_up_at is None else "blew_up",
        "blown_up_at": arm.blown_up_at,
        "horizon": arm.horizon,
        "against": arm.against.name if arm.against else None,
    }


def _fold_record(built: Built) -> dict | None:
    if built.pair is None:
        return None
    fold = built.pair.fold
    return {"origin": fold.origin, "unplaced": fold.unplaced, "unused": fold.unused, "notes": fold.notes}
