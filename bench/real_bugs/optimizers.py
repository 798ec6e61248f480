"""Optimizers: where eps stands, what is corrected, what decays, what is clipped, what is handed over."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from bench.optimizers import everywhere, sgd
from bench.real_bugs import real_update
from bench.real_bugs._networks import RMSNorm, decoder
from bench.real_bugs._rules import Adam, Clipped, Dampened, RMSprop
from bench.tasks import mlp

EVERYWHERE = everywhere(mlp)
NORMS = tuple(name for name, part in decoder.network().named_modules() if isinstance(part, RMSNorm))
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@real_update(
    "rmsprop_with_eps_inside",
    "https://github.com/pytorch/pytorch/issues/23796",
    "ports between TensorFlow and torch 1.1",
    on=mlp,
    module=EVERYWHERE,
    optimizer=partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3),
)
def eps_inside(model: nn.Module, mended: bool) -> Optimizer:
    """TensorFlow adds eps inside the square root, torch outside; a port keeps the number."""
    return RMSprop(model.parameters(), lr=1e-3, eps=1e-3, inside=not mended)


def _adam(model: nn.Module, fault: str, mended: bool, **settings: float) -> Optimizer:
    settings = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8} | settings
    return Adam(model.parameters(), fault="" if mended else fault, **settings)


@real_update(
    "adamw_that_adds_the_decay_to_the_gradient",
    "https://github.com/keras-team/keras/issues/19051",
    "keras 3.0.2 (torch and TensorFlow backends)",
    on=mlp,
    module=EVERYWHERE,
    optimizer=adamw,
)
def coupled(model: nn.Module, mended: bool) -> Optimizer:
    """AdamW inherits from Adam and became Adam with L2 regularisation."""
    return _adam(model, "coupled", mended)


@real_update(
    "adamw_that_decays_the_updated_weight",
    "https://github.com/huggingface/transformers/issues/14539",
    "transformers 4.12",
    on=mlp,
    module=EVERYWHERE,
    optimizer=adamw,
)
def late_decay(model: nn.Module, mended: bool) -> Optimizer:
    """The weight decays after it was moved, not as it was before the step."""
    return _adam(model, "late", mended)


@real_update(
    "adamw_whose_eps_is_corrected_too",
    "https://github.com/karpathy/nanochat/issues/304",
    "nanochat of November 2025",
    on=mlp,
    module=EVERYWHERE,
    optimizer=partial(adamw, eps=1e-5),
)
def scaled_eps(model: nn.Module, mended: bool) -> Optimizer:
    """Eps is added before the second moment's bias is corrected, so that it is scaled with it."""
    return _adam(model, "scaled eps", mended, eps=1e-5)


@real_update(
    "adam_without_bias_correction",
    "https://github.com/ml-explore/mlx/pull/1640",
    "mlx before December 2024",
    on=mlp,
    module=EVERYWHERE,
    optimizer=adamw,
)
def uncorrected(model: nn.Module, mended: bool) -> Optimizer:
    """The moments start at 0 and are not corrected for it."""
    return _adam(model, "uncorrected", mended)


@real_update(
    "first_step_dampened",
    "https://github.com/ml-explore/mlx/pull/473",
    "mlx before January 2024",
    on=mlp,
    module=EVERYWHERE,
    optimizer=sgd(dampening=0.5),
)
def dampened(model: nn.Module, mended: bool) -> Optimizer:
    """The first step is dampened too; torch takes the first gradient whole."""
    return Dampened(model.parameters(), plain_start=mended)


@real_update(
    "norms_decay",
    "https://github.com/huggingface/transformers/pull/35927",
    "transformers before January 2025 (models with an RMSNorm of their own)",
    on=decoder,
    module=NORMS,
    optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
)
def norms_decay(model: nn.Module, mended: bool) -> Optimizer:
    """Norms are told by being an nn.LayerNorm; an RMSNorm of one's own is not, and decays."""
    kept = {
        p
        for m in model.modules()
        if isinstance(m, RMSNorm if mended else nn.LayerNorm)
        for p in m.parameters()
    }
    norms = [p for name, p in model.named_parameters() if "norm" in name or "post" in name]
    decayed = [p for p in norms if p not in kept]
    others = [p for p in model.parameters() if not any(p is d for d in decayed)]
    groups = [{"params": others}] + ([{"params": decayed, "weight_decay": 0.1}] if decayed else [])
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


@real_update(
    "gradients_clipped_one_by_one",
    "https://github.com/huggingface/transformers/issues/581",
    "pytorch-pretrained-BERT of May 2019 (BertAdam)",
    on=mlp,
    module=EVERYWHERE,
    optimizer=partial(Clipped, globally=True),
)
def clipped(model: nn.Module, mended: bool) -> Optimizer:
    """Each weight's gradient is clipped by its own norm, not by the norm of all."""
    return Clipped(model.parameters(), globally=mended)


@real_update(
    "group_never_handed_over",
    "https://github.com/zjunlp/HVPNeT/issues/5",
    "HVPNeT before August 2022",
    on=mlp,
    module="fc3",
)
def forgotten(model: nn.Module, mended: bool) -> Optimizer:
    """The last layers' parameter group is built and never appended: they do not learn."""
    groups = [{"params": [*model.fc1.parameters(), *model.fc2.parameters()]}]
    if mended:
        groups.append({"params": list(model.fc3.parameters())})
    return sgd()(groups)
