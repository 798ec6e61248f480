"""What ``run.json`` says about a seed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from driftlab.arm import Arm
from driftlab.environment import environment
from driftlab.records import SCHEMA
from experiments.data.images import Images

if TYPE_CHECKING:
    from experiments.experiment_folder import Experiment
    from experiments.seed_run import Built


def run_record(experiment: Experiment, seed: int, built: Built, began: float, start: int) -> dict:
    """Of a seed that was trained from step ``start`` on, since ``began`` (as ``time.time``)."""
    record = seed_record(experiment, seed, began)
    record["arms"] = {arm.name: _arm_record(arm) for arm in built.lockstep.arms}
    record["fold"] = _fold_record(built)
    record["times"]["resumed_at_step"] = start or None
    return record


def seed_record(experiment: Experiment, seed: int, began: float) -> dict:
    """What every kind of experiment says of a seed that has just finished; its arms are still missing."""
    settings, finished = experiment.settings, time.time()
    return {
        "schema": SCHEMA,
        "experiment": settings.name,
        "digest": experiment.digest,
        "seed": seed,
        "outcome": "finished",
        "command": experiment.command,
        "arms": {},
        "dataset": _dataset_record(experiment.images),
        "environment": environment(torch.device(settings.device)),
        "times": {
            "began": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            "finished": datetime.fromtimestamp(finished, UTC).isoformat(timespec="seconds"),
            "seconds": round(finished - began, 3),
        },
    }


def _dataset_record(images: Images | None) -> dict:
    if images is None:
        return {"name": "random numbers", "sha256": None, "source": "drawn from the seed", "stand_in": False}
    return {
        "name": images.name,
        "sha256": images.sha256,
        "source": images.source,
        "stand_in": images.stand_in,
        "train_images": len(images.train_images),
        "test_images": len(images.test_images),
    }


def _arm_record(arm: Arm) -> dict:
    return {
        "outcome": "finished" if arm.blown_up_at is None else "blew_up",
        "blown_up_at": arm.blown_up_at,
        "horizon": arm.horizon,
        "against": arm.against.name if arm.against else None,
    }


def _fold_record(built: Built) -> dict | None:
    if built.subject is None:
        return None
    fold = built.subject.fold
    return {"origin": fold.origin, "unplaced": fold.unplaced, "unused": fold.unused, "notes": fold.notes}
