"""One seed of a training, ready for step 0: its arms, batches, pair, and which steps leave a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from driftlab.arithmetic.sizes import fewer_samples
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import calling, each_tensor
from driftlab.network.pair import Pair
from suite.data.batches import Batches
from suite.data.samples import DataSet, SampleBatches, Samples
from suite.running.networks import build_arms
from suite.running.updates import make_loss


@dataclass(frozen=True)
class LogSchedule:
    """Every step below ``dense``, then ``per_decade`` steps for each factor of ten.

    With the defaults 80,000 steps leave about 720 rows. ``per_decade=0`` stops after ``dense``.

    Raises:
        ValueError: where ``dense`` < 1 or ``per_decade`` < 0.
    """

    dense: int = 200
    per_decade: int = 200

    def __post_init__(self) -> None:
        if self.dense < 1 or self.per_decade < 0:
            raise ValueError(
                f"log_schedule: dense={self.dense} is below 1 or per_decade={self.per_decade} below 0"
            )

    def __call__(self, step: int) -> bool:
        # every step below it; it begins the grid, and the step before may be 0, which has no logarithm
        if step <= self.dense:
            return step < self.dense or self.per_decade > 0
        # the first integer of each cell of a grid that is even in log(step)
        return self.per_decade > 0 and self._cell(step) != self._cell(step - 1)

    def _cell(self, step: int) -> int:
        return math.floor(self.per_decade * math.log10(step / self.dense))


class Built(NamedTuple):
    """One seed, ready for step 0."""

    lockstep: Lockstep
    batches: Batches
    pair: Pair | None


def build(settings: DictConfig, data_set: DataSet, seed: int) -> Built:
    seeds = own_seeds(settings, seed)
    batches = make_batches(settings, data_set, seeds)
    few = _few_inputs(batches)
    arms, pair = build_arms(settings, data_set, seeds, few)
    schedule = LogSchedule(settings.log_schedule.dense, settings.log_schedule.per_decade)
    call = calling(arms[0].module, few)
    return Built(
        Lockstep(arms, make_loss(settings), seed=seeds["order"], logged=schedule, call=call), batches, pair
    )


def _few_inputs(batches: Batches | SampleBatches) -> object:
    """Those of two samples, on the CPU; of the whole batch, where its tensors share no batch dimension."""
    batch = batches.batch(0)
    inputs, _ = fewer_samples(batch, 2) or batch
    return each_tensor(lambda t: t.cpu(), inputs)


def on_cpu(settings: DictConfig) -> DictConfig:
    """For what a process looks at before its workers begin: a GPU may be one process's alone."""
    settings = settings.copy()
    settings.device = "cpu"
    return settings


def own_seeds(settings: DictConfig, seed: int) -> dict[str, int]:
    """Of everything random: ``seed``, where ``seeds`` does not set one alone."""
    return {name: seed if own is None else own for name, own in settings.seeds.items()}


def make_batches(
    settings: DictConfig, data_set: DataSet, seeds: Mapping[str, int]
) -> Batches | SampleBatches:
    by = {"batch_size": settings.batch_size, "device": torch.device(settings.device)}
    by |= {"order_seed": seeds["order"], "augmentation_seed": seeds["augmentation"]}
    if isinstance(data_set, Samples):
        return SampleBatches(data_set, **by)
    return Batches(data_set, **by, augment=settings.augment)
