"""What a step costs in each dtype, what lockstep adds, and how many seeds a GPU holds, at full width."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from scripts.gpu_parts.part import Check, Found, Items, Part, TooLong
from scripts.gpu_parts.training import drawn_images, settings_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from driftlab.lockstep.arm import Arm
    from suite.running.building import Built

MOST_STEPS, LONG_ENOUGH = 30, 3.0  # seconds: what a timing goes on for
FEW, MANY = 3, 23  # steps of two runs: what they cost once is in both, and drops out


def items(check: Check) -> Items:
    steps = {
        "float32 step": partial(_step, "float32"),
        "float32 step with TF32": partial(_step, "float32", tf32=True),
        "float64 step": partial(_step, "float64"),
        "float64 step, cuDNN off": partial(_step, "float64", cudnn=False),
    }
    more = {
        "memory of a seed": _memory,
        "lockstep, float32 arms": partial(_lockstep, ["dtypes=[float32]"]),
        "lockstep, all arms": partial(_lockstep, []),
    }
    if check.smoke:
        del steps["float32 step"], steps["float64 step"], more["lockstep, all arms"]
    return steps | more


def _step(dtype: str, check: Check, *, tf32: bool = False, cudnn: bool = True) -> Found:
    """One arm: forward, backward, update."""
    import torch

    with _built(check, tf32=tf32) as built:
        arm = next(a for a in built.lockstep.arms if a.dtype == dtype)
        with nullcontext() if cudnn else torch.backends.cudnn.flags(enabled=False):
            seconds = _seconds(partial(_train, built, arm), 0.0 if check.smoke else LONG_ENOUGH)
    batch = len(built.batches.batch(0)[1])
    return Found(f"{1000 * seconds:.1f} ms an arm, batch {batch}", values={"seconds": seconds})


def _train(built: Built, arm: Arm) -> None:
    import torch

    from driftlab.network.calling import cast

    inputs, targets = built.batches.batch(0)
    arm.optimizer.zero_grad()
    built.lockstep.loss(arm.module(cast(inputs, arm.precision.dtype)), targets).backward()
    arm.optimizer.step()
    torch.cuda.synchronize()


def _seconds(call: Callable[[], None], long_enough: float) -> float:
    """Median; the first call warms up."""
    times: list[float] = []
    while len(times) < 2 or (sum(times) < long_enough and len(times) < MOST_STEPS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _memory(check: Check) -> Found:
    """All arms with their optimizers' state, two steps and an evaluation."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with _built(check) as built:
        for step in range(2):
            built.lockstep.forward_backward(step, *built.batches.batch(step))
            built.lockstep.update(step)
        settings = _settings(check)
        images = list(built.batches.test_batches(settings.batch_size, settings.batch_size))
        built.lockstep.evaluate(2, images)
        torch.cuda.synchronize()
        arms, peak = len(built.lockstep.arms), torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()  # CUDA's own, and what others hold
    if not peak:
        return Found("torch keeps no account of this device's memory")
    seeds = total // (peak + context)
    each = f"{peak / 2**30:.1f} GiB for {arms} arms and {context / 2**30:.1f} GiB for CUDA"
    reading = f"{each}: {seeds} {'seed' if seeds == 1 else 'seeds'} at a time on this GPU"
    return Found(reading, seeds > 0, {"peak": peak, "context": context, "total": total, "seeds": seeds})


def _lockstep(chosen: list[str], check: Check) -> Found:
    """By the functions of ``scripts/benchmark.py``, from a short and a longer run."""
    from scripts.benchmark import bare_seconds, lockstep_seconds

    images = drawn_images()
    took: dict[str, list[float]] = {"lockstep": [], "bare": []}
    for steps in (FEW,) if check.smoke else (FEW, FEW, MANY):  # the first pair warms up
        if steps == MANY and (sum(took["lockstep"] + took["bare"]) / 2 * MANY / FEW) > check.left():
            raise TooLong(f"{MANY} steps would take longer than the {check.left():.0f} s that were left")
        settings = _settings(check, *chosen, steps=steps)
        with _arithmetic(), tempfile.TemporaryDirectory() as home:
            took["lockstep"].append(lockstep_seconds(settings, images, Path(home)))
            took["bare"].append(bare_seconds(settings, images))
    more = {side: seconds[-1] - seconds[-2] if seconds[1:] else 0.0 for side, seconds in took.items()}
    if min(more.values()) <= 0:
        return Found("too few steps to tell", values={"seconds": took})
    ratio = more["lockstep"] / more["bare"]
    return Found(
        f"{ratio:.2f} times the same arms alone ({MANY - FEW} steps)",
        values={"seconds": took, "ratio": ratio},
    )


@contextmanager
def _built(check: Check, *, tf32: bool = False) -> Iterator[Built]:
    """A seed of ``split_conv``, in the arithmetic that a run has."""
    from suite.running.building import build

    with _arithmetic(tf32=tf32):
        yield build(_settings(check), drawn_images(), 0)


def _arithmetic(*, tf32: bool = False) -> AbstractContextManager[None]:
    from driftlab.process import settled

    return settled(tf32=tf32, cuda=True)


def _settings(check: Check, *overrides: str, steps: int = FEW) -> DictConfig:
    return settings_of(check, "split_conv", f"steps={steps}", f"float64_steps={steps}", *overrides)


PART = Part("times", "What a step costs", 1.5, items)
