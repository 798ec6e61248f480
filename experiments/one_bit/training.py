"""One training, from a network and its batches to its predictions on the test images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from driftlab.network.calling import evaluation_mode
from experiments.one_bit.stored import packed
from suite.data.batches import Batches
from suite.running.updates import make_optimizer

EVALUATION_BATCH = 500
LARGEST = 65504.0  # of float16


def trained(settings: DictConfig, module: nn.Module, batches: Batches, seed: int) -> dict:
    """What a training from ``module`` ends at; ``module`` is trained in place. ``seed`` is of random layers.

    Nothing waits for the device before the end.
    """
    module = laid_out(module.to(settings.device), settings)
    optimizer = make_groups(settings, module)
    scheduler = LambdaLR(optimizer, rate_of(settings))
    looks, seen = set(look_steps(settings.steps, settings.progress.points)), []
    torch.manual_seed(seed)
    for step in range(settings.steps):
        inputs, targets = batches.batch(step)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(module(as_seen(inputs, settings)), targets).backward()
        optimizer.step()
        scheduler.step()
        if step + 1 in looks:
            seen.append(_logits(settings, module, batches, settings.progress.images).argmax(1))
    logits = _logits(settings, module, batches, settings.eval_images).float().cpu()
    return _predictions(logits) | {
        "on_the_way": packed(torch.stack(seen).cpu().numpy(), "i2"),
        "weights": digest_of(module),
    }


def _predictions(logits: Tensor) -> dict:
    """``finite`` is False for a training that blew up; its other numbers then mean nothing."""
    finite = bool(logits.isfinite().all())
    stored = logits.nan_to_num(0.0).clamp(-LARGEST, LARGEST).numpy()
    classes = logits.argmax(1).numpy()
    return {"finite": finite, "classes": packed(classes, "i2"), "logits": packed(stored, "f2")}


def look_steps(steps: int, points: int) -> list[int]:
    """About ``points`` numbers of updates from 1 to ``steps``, evenly on a log scale."""
    return sorted({round(float(s)) for s in np.geomspace(1, steps, points)})


def rate_of(settings: DictConfig):
    """step -> factor of the peak rate: a straight line from 0, then the cosine, or 1 where it is constant.

    The cosine counts from step 0, not from the end of the warm-up, as in Summers and Dinneen's code.
    """

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return step / settings.warmup_steps
        if settings.learning_rate_schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * min(step / settings.steps, 1.0)))

    return factor


def make_groups(settings: DictConfig, module: nn.Module, rate: float | None = None) -> Optimizer:
    """The optimizer, with biases and norms (parameters of one dimension) at ``norm_rate`` times the rate."""
    peak = settings.optimizer.lr if rate is None else rate
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "lr": peak},
        {"params": [p for p in parameters if p.dim() < 2], "lr": peak * settings.norm_rate},
    ]
    return make_optimizer(settings)([group for group in groups if group["params"]])


def as_seen(inputs: Tensor, settings: DictConfig) -> Tensor:
    """A batch [B, C, H, W] as the networks see it: averaged over shrink x shrink pixels, laid out."""
    if settings.shrink > 1:
        inputs = F.avg_pool2d(inputs, settings.shrink)
    return laid_out(inputs, settings)


def laid_out(what: Tensor | nn.Module, settings: DictConfig):
    """In the memory format of the settings."""
    return what.to(memory_format=torch.channels_last) if settings.channels_last else what


def _logits(settings: DictConfig, module: nn.Module, batches: Batches, images: int | None) -> Tensor:
    with evaluation_mode(module):
        parts = batches.test_batches(images, EVALUATION_BATCH)
        return torch.cat([module(as_seen(inputs, settings)) for inputs, _ in parts])


def digest_of(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, folded to the names of the network as it was before a split."""
    tensors: Mapping[str, Tensor] = dict(_tensors(module))
    tensors = module.fold(tensors) if hasattr(module, "fold") else tensors
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
