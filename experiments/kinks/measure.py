"""What one seed of ``kinks`` gives: drift, sign flips and their prediction, of each network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from driftlab.lockstep.loop import Lockstep
from driftlab.record.seed_record import SeedRecord
from experiments.kinks.crossings import COUNTS, KINDS, Watch
from experiments.kinks.judged import probes
from suite.command.errors import ConfigurationError
from suite.data.batches import Batches
from suite.data.images import Images
from suite.running.asking import Measured
from suite.running.building import LogSchedule, build, make_batches, own_seeds
from suite.running.networks import build_arms
from suite.running.updates import make_loss

ARMS = tuple(f"{role}.{dtype}" for dtype in ("float32", "float64") for role in ("reference", "control"))
_CONTROL = tuple(arm for arm in ARMS if arm.startswith("control"))
COLUMNS = (
    *(f"loss/{arm}" for arm in ARMS),
    *(f"{kind}/{arm}" for kind in ("weight_distance", "sign_flips") for arm in _CONTROL),
)


def about(settings: DictConfig) -> str:
    """Raises ConfigurationError where the arms are not those that are needed."""
    names = [name_of(n) for n in _networks(settings)]
    return f"{'; '.join(names)}: {settings.steps} steps, reference and control in float32 and float64"


def name_of(network: Mapping[str, str]) -> str:
    """As it stands in tables: "ReLU, max-pool"."""
    activation = {"relu": "ReLU", "silu": "SiLU"}[network["activation"]]
    return f"{activation}, {network['pool']}-pool"


def measure(settings: DictConfig, seed: int, images: Images) -> Measured:
    """Raises ConfigurationError as ``about`` does."""
    seeds = own_seeds(settings, seed)
    batches = make_batches(settings, images, seeds)
    found = {name_of(n): _trained(settings, n, images, batches, seeds) for n in _networks(settings)}
    run = {"arms": {}, "probes": [p.as_dict() for p in probes(found)]}
    return Measured(SeedRecord(seed, [], [], run), {"networks": found})


def _trained(
    settings: DictConfig, network: Mapping[str, str], images: Images, batches: Batches, seeds: dict[str, int]
) -> dict:
    """One network in both dtypes, from the same seeds as the others."""
    arms, _ = build_arms(_with(settings, network), images, seeds, batches.batch(0)[0][:2].cpu())
    watch = Watch(arms)
    schedule = LogSchedule(settings.log_schedule.dense, settings.log_schedule.per_decade)
    lockstep = Lockstep(arms, make_loss(settings), seed=seeds["order"], logged=schedule)
    for step in range(lockstep.steps + 1):
        watch.look(step, lockstep.is_logged(step))
        lockstep.forward_backward(step, *batches.batch(step))
        lockstep.update(step)
    lockstep.flush()
    return _as_stored(network, lockstep, watch)


def check(settings: DictConfig, seed: int, images: Images) -> None:
    """Raises ConfigurationError where a network cannot be built."""
    for network in _networks(settings):
        build(_with(settings, network), images, seed)


def _with(settings: DictConfig, network: Mapping[str, str]) -> DictConfig:
    return OmegaConf.merge(settings, {"model": dict(network)})


def _as_stored(network: Mapping[str, str], lockstep: Lockstep, watch: Watch) -> dict:
    """Column -> a value for each logged step; None where there is none (an arm that had ended)."""
    steps = sorted(lockstep.rows)
    counts = watch.fetched()
    crossings = {
        f"{kind}/{dtype}": {
            count: [_of(counts, (dtype, kind, s), i, lockstep.rows[s]) for s in steps]
            for i, count in enumerate(COUNTS)
        }
        for kind in KINDS
        for dtype in ("float32", "float64")
        if any((dtype, kind, s) in counts for s in steps)
    }
    return {
        "network": dict(network),
        "steps": steps,
        "curves": {c: [_finite(lockstep.rows[s].get(c)) for s in steps] for c in COLUMNS},
        "crossings": crossings,
        "blown_up_at": {arm.name: arm.blown_up_at for arm in lockstep.arms},
    }


def _of(counts: Mapping, key: tuple[str, str, int], index: int, row: Mapping[str, float]) -> float | None:
    """A count where the record has that step of that pair: a GPU runs on for some steps after a NaN."""
    dtype = key[0]
    there = key in counts and f"weight_distance/control.{dtype}" in row
    return _finite(counts[key][index]) if there else None


def _finite(value: float | None) -> float | None:
    """None for what is not finite: the last row of an arm that blew up."""
    return value if value is not None and math.isfinite(value) else None


def _networks(settings: DictConfig) -> Sequence[Mapping[str, str]]:
    if {*settings.roles} != {"reference", "control"} or {*settings.dtypes} != {"float32", "float64"}:
        raise ConfigurationError("kinks needs roles=[reference,control] and dtypes=[float32,float64]")
    return OmegaConf.to_container(settings.networks)
