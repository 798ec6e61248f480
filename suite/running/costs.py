"""What a seed costs on this machine: its own steps, timed on arms that are thrown away afterwards."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig

from driftlab.lockstep.arm import Arm
from driftlab.lockstep.loop import Lockstep
from driftlab.record.environment import device_name
from suite.command.configuration import AUTO, steps_in, with_float64_steps
from suite.data.samples import DataSet
from suite.running.building import Built, LogSchedule, build
from suite.running.recorder import is_evaluated

# Seconds that a timing goes on for, so that small steps are timed many times; and after which a first call
# tells enough by itself. No timing takes more than this share of the training's own steps.
LONG_ENOUGH, TOO_LONG, SHARE = 0.2, 1.0, 0.1
# What the probes before the training take, in steps of all arms on as many samples as they are given: 23 to
# 56 in four experiments (split_conv and grouped_conv, smoke and small).
PROBES = 25.0
# Until a seed trains: lightning is imported, networks are built; for workers everything is imported anew.
START, START_OF_A_WORKER = 3.0, 5.0


@dataclass(frozen=True)
class Cost:
    """Seconds, of all arms of one dtype together.

    Attributes:
        step: a batch, forward, backward and update.
        row: what a step takes more that leaves a row.
        evaluation: one evaluation on the test set.
    """

    step: float
    row: float
    evaluation: float


@dataclass(frozen=True)
class Sketch:
    """A seed before it is trained.

    Attributes:
        arms: their names.
        parameters: of the reference.
        device: its name.
        costs: by dtype; empty where nothing was timed.
        probes: seconds of the probes before the training and of the look at its end, at least.
    """

    arms: tuple[str, ...]
    parameters: int
    device: str
    costs: Mapping[str, Cost] = field(default_factory=dict)
    probes: float = 0.0


def build_sketched(settings: DictConfig, data_set: DataSet, seed: int) -> Built:
    """A seed on the device of ``settings``; all steps in float64, where the number is still to be chosen."""
    if settings.float64_steps == AUTO:
        settings = with_float64_steps(settings, settings.steps)
    return build(settings, data_set, seed)


def make_sketch(settings: DictConfig, built: Built, *, timed: bool = True) -> Sketch:
    """Of a seed that was built and is not trained: where ``timed`` a few of its steps are run."""
    arms = built.lockstep.arms
    parameters = sum(p.numel() for p in arms[0].module.parameters())
    names = tuple(arm.name for arm in arms)
    device = device_name(built.batches.device)
    if not timed:
        return Sketch(names, parameters, device)
    costs = {d: _cost(built, [a for a in arms if a.dtype == d], settings) for d in settings.dtypes}
    return Sketch(names, parameters, device, costs, _probes(built, costs, settings))


def training_seconds(settings: DictConfig, cost: Cost, horizon: int, start: int = 0) -> float:
    """Of the arms of one dtype, from step ``start`` on."""
    logged = LogSchedule(settings.log_schedule.dense, settings.log_schedule.per_decade)
    steps = range(start, horizon + 1)
    rows = sum(step == horizon or logged(step) for step in steps)
    evaluations = sum(step == horizon or is_evaluated(step, settings.eval_every) for step in steps)
    return len(steps) * cost.step + rows * cost.row + evaluations * cost.evaluation


def float64_choice(settings: DictConfig, sketch: Sketch) -> dict:
    """``float64_steps=auto``: as many as leave float64 its share of the training, at least ``least``."""
    least = settings.scale.get("least_float64_steps") or settings.scale.float64_steps
    choice = {"float64_share": settings.float64_share, "least": least, "device": sketch.device}
    others = [dtype for dtype in sketch.costs if dtype != "float64"]
    if not others or "float64" not in sketch.costs:
        why = "all, since nothing is trained in another dtype"
        return choice | {"float64_steps": settings.steps, "why": why}

    def of(dtype: str, steps: int) -> float:
        return training_seconds(settings, sketch.costs[dtype], steps)

    narrow, share = sum(of(dtype, settings.steps) for dtype in others), settings.float64_share
    allowed = share / (1 - share) * narrow
    fit = bisect_right(range(settings.steps + 1), allowed, key=lambda steps: of("float64", steps)) - 1
    steps = min(max(fit, least), settings.steps)
    seconds = {d: cost.step for d, cost in sketch.costs.items()}
    times = " and ".join(f"{seconds[d]:.2g} s a step in {d}" for d in ("float64", *others))
    taken = of("float64", steps)
    why = f"{taken / (taken + narrow):.0%} of the training, by {times} on {sketch.device}; "
    why += f"float64_share={share}" if fit >= least or steps < least else f"the least, {least}"
    return choice | {"float64_steps": steps, "seconds_a_step": seconds, "why": why}


def _cost(built: Built, arms: list[Arm], settings: DictConfig) -> Cost:
    for arm in arms:
        arm.scheduler = None  # one that ends with the training, as OneCycleLR, refuses further steps
    plain, logged = (_steps(built, arms, every=every) for every in (False, True))
    calls = max(1, int(SHARE * settings.steps))
    warm_up = _seconds(plain)
    step = warm_up if warm_up > TOO_LONG else _seconds(plain, calls)
    tested = list(built.batches.test_batches(settings.eval_images, settings.batch_size))
    lockstep = Lockstep(arms, built.lockstep.loss, built.lockstep.seed, call=built.lockstep.call)
    evaluation = len(tested) * _seconds(lambda: lockstep.evaluate(0, tested[:1]), calls)
    return Cost(step, max(_seconds(logged, calls) - step, 0.0), evaluation)


def _steps(built: Built, arms: list[Arm], *, every: bool) -> Callable[[], None]:
    mine = built.lockstep
    lockstep = Lockstep(arms, mine.loss, mine.seed, logged=lambda step: every, call=mine.call)

    def step() -> None:
        lockstep.forward_backward(0, *built.batches.batch(0))
        lockstep.update(0)
        lockstep.flush()  # waits for a GPU

    return step


def _seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Mean of a call, as often as there is time, at most ``calls`` times."""
    made, began = 0, time.perf_counter()
    while made == 0 or (made < calls and time.perf_counter() - began < LONG_ENOUGH):
        call()
        made += 1
    return (time.perf_counter() - began) / made


def _probes(built: Built, costs: Mapping[str, Cost], settings: DictConfig) -> float:
    if built.pair is None:
        return 0.0
    share = min(settings.probe_images, settings.batch_size) / settings.batch_size
    return PROBES * share * sum(cost.step for cost in costs.values())


def forecast(settings: DictConfig, sketch: Sketch, starts: Sequence[int], workers: int) -> float:
    """Seconds until all seeds have finished that go on from the steps ``starts``, at least."""
    ends = [0.0] * workers
    for start in starts:
        seconds = 0.0 if start else sketch.probes
        seconds += sum(
            training_seconds(settings, c, steps_in(settings, d), start) for d, c in sketch.costs.items()
        )
        ends[ends.index(min(ends))] += seconds
    return max(ends) + (START_OF_A_WORKER if workers > 1 else START)
