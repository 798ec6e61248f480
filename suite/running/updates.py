"""What moves the weights, by the settings: loss, optimizer, learning rate, and what bounds gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from driftlab.arguments import clipped_by
from driftlab.network.loss import Loss
from driftlab.process import noticed
from suite.command.errors import ConfigurationError, one_line
from suite.command.users_code import let_end
from suite.running.importing import imported

Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]
# The share of the steps over which the rate rises, where `warmup` says nothing; OneCycleLR's is torch's.
WARMUP = {"warmup_cosine": 0.05, "onecycle": 0.3}


def make_loss(settings: DictConfig) -> Loss:
    """Of outputs and targets: an instance of a class, on the device, or a function with its arguments."""
    function = imported("loss._target_", settings.loss._target_)
    if isinstance(function, type):
        loss = _made(settings, "loss")
        return loss.to(settings.device) if isinstance(loss, nn.Module) else loss
    return _made(settings, "loss", _partial_=True) if len(settings.loss) > 1 else function


def make_optimizer(settings: DictConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """From parameters to optimizer; what it refuses (a rate that is no number) is the user's to mend."""
    return lambda parameters: _made(settings, "optimizer", _partial_=True)(parameters)


def make_clip(settings: DictConfig) -> Callable[[nn.Module], object] | None:
    """Cuts the norm of all gradients of a module together to ``clip``; None where nothing is cut."""
    return clipped_by(settings.clip)


def make_scheduler(settings: DictConfig) -> Scheduler | None:
    """Makes an arm's learning-rate scheduler from its optimizer; None where the rate is constant."""
    if settings.scheduler._target_:
        return partial(_own, settings)
    steps, name = settings.steps, settings.learning_rate_schedule
    warmup = round(steps * (WARMUP.get(name, 0) if settings.warmup is None else settings.warmup))
    match name:
        case "cosine":
            return partial(_cosine, 0, steps)
        case "warmup_cosine":
            return partial(_cosine, min(max(warmup, 1), steps), steps)
        case "onecycle":
            return partial(_one_cycle, max(warmup, 2), steps)
    return None


def _cosine(warmup: int, steps: int, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """In a straight line up to the full rate at update ``warmup``, then the cosine."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = 1.0 if steps == warmup else min(step - warmup, steps - warmup) / (steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, share)


def _one_cycle(warmup: int, steps: int, optimizer: torch.optim.Optimizer) -> OneCycleLR:
    """Smith and Topin, "Super-convergence" (2019), as torch has it: up to the optimizer's own rate and down.

    One step more than there are updates, for it is moved after the last one too.
    """
    highest = [group["lr"] for group in optimizer.param_groups]
    moves = bool(optimizer.defaults.get("momentum")) or "betas" in optimizer.defaults
    total = steps + 1
    share = min(warmup, total) / total
    return OneCycleLR(optimizer, highest, total_steps=total, pct_start=share, cycle_momentum=moves)


def _own(settings: DictConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    scheduler = _made(settings, "scheduler", optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            f"scheduler._target_={settings.scheduler._target_} made a {type(scheduler).__name__}: name a "
            "scheduler of torch's that moves by the number of updates alone"
        )
    return scheduler


def _made(settings: DictConfig, name: str, *given: object, **how: Any) -> Any:
    try:
        with noticed(f"the {name}"):
            return hydra.utils.instantiate(settings[name], *given, **how, _convert_="all")
    except BaseException as error:
        let_end(error)
        raise ConfigurationError(f"{name}: {one_line(error.__cause__ or error)}") from None
