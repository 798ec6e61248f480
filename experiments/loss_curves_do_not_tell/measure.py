"""What one seed gives: all networks trained in one lockstep, what the rules see of each, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from bench.habits import all_close
from driftlab.diagnosis import diagnosed
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import copied
from driftlab.network.pair import Pair
from driftlab.process import random_state_kept
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.outcomes import tail_of
from driftlab.verdict.rules import judge
from experiments.loss_curves_do_not_tell.networks import CONTROL, NETWORKS, RIGHT, build_arms, subjects
from suite.command.errors import ConfigurationError
from suite.data.batches import Batches
from suite.data.images import Images
from suite.running.asking import Measured
from suite.running.building import LogSchedule, make_batches, own_seeds
from suite.running.networks import build_reference
from suite.running.updates import make_loss

DTYPES = ("float32", "float64")
KINDS = ("loss", "weight_distance", "gradient_distance", "logit_distance", "sign_flips")


def about(settings: DictConfig) -> str:
    """Raises ConfigurationError where the settings leave out what the question is about."""
    if set(settings.dtypes) != set(DTYPES):
        raise ConfigurationError(f"dtypes={list(settings.dtypes)}: {settings.name} compares both dtypes")
    wrong = sum(not network.same for network in NETWORKS)
    return (
        f"{len(NETWORKS)} networks beside the reference, {wrong} of them wrong; {settings.steps} float32 and "
        f"{settings.float64_steps} float64 steps, and a diagnosis of each"
    )


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Raises ConfigurationError where a rewrite does not fit the network of the settings."""
    about(settings)
    with random_state_kept():
        seeds = own_seeds(settings, seed)
        batches, reference, pairs = built(settings, seed, images)
        arms = build_arms(settings, reference, pairs, seeds["nudge"])
        lockstep = Lockstep(arms, make_loss(settings), seed=seeds["order"], logged=_logged(settings))
        values = {"output_mean": _output_means(arms, batches.batch(0)[0])}
        values |= _trained(lockstep, batches, settings.eval_images)
        del lockstep, arms  # a GPU has other uses for their memory
        record, verdicts = _diagnoses(pairs, batches, settings.diagnosis_steps)
    return Measured(record, values | {"verdicts": verdicts})


def built(settings: DictConfig, seed: int, images: Images) -> tuple[Batches, nn.Module, dict[str, Pair]]:
    """What a seed trains, and on what. Raises ConfigurationError as ``measure`` does."""
    seeds = own_seeds(settings, seed)
    batches = make_batches(settings, images, seeds)
    reference = build_reference(settings, images, seeds["init"])
    return batches, reference, subjects(settings, reference, seeds["order"])


def _logged(settings: DictConfig) -> Callable[[int], bool]:
    """As the schedule says, and the last tenth of either dtype's steps, over which losses are averaged."""
    schedule = LogSchedule(settings.log_schedule.dense, settings.log_schedule.per_decade)
    ends = (settings.steps, settings.float64_steps)
    return lambda step: schedule(step) or any(n - tail_of(n) < step <= n for n in ends)


def _narrow(arms: list[Arm]) -> list[Arm]:
    """Those in float32 that have one to compare with."""
    return [arm for arm in arms if arm.dtype == "float32" and arm.role != "reference"]


def _output_means(arms: list[Arm], inputs: Tensor) -> dict[str, dict]:
    """The mean of the first batch's logits in training mode, float32, beside the reference's.

    ``close`` is torch.isclose with its defaults. On copies: a forward pass moves the batch-norm buffers.
    """
    found = {}
    with torch.no_grad():
        for arm in _narrow(arms):
            mine, theirs = (copied(a.module).train()(inputs) for a in (arm, arm.against))
            close = torch.isclose(mine.mean(), theirs.mean())
            found[arm.role] = {
                "mean": float(mine.mean()),
                "reference": float(theirs.mean()),
                "close": bool(close),
                "same_bits": bool(torch.equal(mine, theirs)),
            }
    return found


def _trained(lockstep: Lockstep, batches: Batches, eval_images: int | None) -> dict:
    """Every step; the weights after the first, and the test images after the last."""
    found = {}
    for step in range(lockstep.steps + 1):
        if step == lockstep.steps:
            lockstep.flush()
            found["test"] = _tested(lockstep, batches, eval_images)  # before one more batch moves the buffers
        lockstep.forward_backward(step, *batches.batch(step))
        lockstep.update(step)
        if step == 0:
            found["allclose"] = {arm.role: all_close(arm) for arm in _narrow(lockstep.arms)}
    lockstep.flush()
    return found | {
        "curves": {arm.name: _curves(lockstep, arm) for arm in lockstep.arms},
        "blown_up_at": {arm.name: arm.blown_up_at for arm in lockstep.arms},
    }


def _tested(lockstep: Lockstep, batches: Batches, count: int | None) -> dict[str, dict]:
    """Of each float32 network: loss and accuracy on test images, and on how many it differs."""
    images = list(batches.test_batches(count, batches.batch_size))
    found, chosen = {}, {}
    for arm in (a for a in lockstep.arms if a.dtype == "float32" and a.blown_up_at is None):
        logits, targets = lockstep.predictions(arm, images)
        chosen[arm.role] = logits.argmax(1)
        found[arm.role] = {
            "loss": float(lockstep.loss(logits, targets)),
            "accuracy": float((chosen[arm.role] == targets).double().mean()),
        }
        if "reference" in chosen:
            apart = chosen[arm.role] != chosen["reference"]
            found[arm.role]["disagreement"] = float(apart.double().mean())
    return found


def _curves(lockstep: Lockstep, arm: Arm) -> dict[str, list]:
    """``step``, and each kind at those steps; None where it was not measured."""
    rows = {s: row for s, row in sorted(lockstep.rows.items()) if f"loss/{arm.name}" in row}
    kinds = {kind: [row.get(f"{kind}/{arm.name}") for row in rows.values()] for kind in KINDS}
    return {"step": list(rows)} | {k: v for k, v in kinds.items() if any(x is not None for x in v)}


def _diagnoses(pairs: Mapping[str, Pair], batches: Batches, steps: int) -> tuple[SeedRecord, dict[str, dict]]:
    """The record of the right pair, and what driftlab says of each network on its first batches.

    The control is nudged in each dtype's own last place, so it is asked about as the tool itself asks about
    one: in the window of the right pair, ``subject="control"``. Nudged in float32 and handed over as a
    rewrite it would be another function, whose weight is off by one part in 2^24 in float64 too.
    """
    first = [batches.batch(step) for step in range(steps + 1)]
    records = {role: diagnosed(pair, first, steps) for role, pair in pairs.items()}
    judged = {CONTROL: judge([records[RIGHT]], subject=CONTROL)}
    judged |= {role: judge([record]) for role, record in records.items()}
    verdicts = {
        role: {
            "verdict": str(judgement.verdict),
            "headline": judgement.headline,
            "where": judgement.where.as_dict() if judgement.where else None,
        }
        for role, judgement in judged.items()
    }
    return records[RIGHT], verdicts
