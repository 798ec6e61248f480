"""Ports of Llama that bring an optimizer of their own: its groups, its schedule."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import everywhere
from bench.ported._text_llama import every, llama
from bench.ported.text_llama import MegatronLlama

EVERYWHERE = everywhere(llama)
NORMS = ("model.norm", *every("input_layernorm"), *every("post_attention_layernorm"))
adamw = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def groups(model: nn.Module, wrong: bool = True) -> Optimizer:
    """Weights of two dimensions or more decay, the rest in a group of its own."""
    weights = [p for p in model.parameters() if p.requires_grad]
    wide = [p for p in weights if p.dim() >= 2]
    narrow = [p for p in weights if p.dim() < 2]
    return adamw([{"params": wide}, {"params": narrow, "weight_decay": 0.0 if wrong else 0.1}])


@case(
    "bug",
    "groups of the optimizer",
    llama,
    module=NORMS,
    passes="update",
    optimizer=adamw,
    candidate_optimizer=groups,
)
def llama_norms_without_decay(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The port brings its own groups, in which norms do not decay; here everything did."""
    return MegatronLlama(model)


def by_name(model: nn.Module) -> Optimizer:
    """A group a layer, all with the settings of the reference's only group."""
    layers: dict[str, list] = {}
    for name, weight in model.named_parameters():
        layers.setdefault(".".join(name.split(".")[:2]), []).append(weight)
    return adamw([{"params": weights} for weights in layers.values()])


@case(SAME, "groups of the optimizer", llama, optimizer=adamw, candidate_optimizer=by_name)
def llama_with_a_group_a_layer(model: nn.Module) -> nn.Module:
    return MegatronLlama(model)


class Warmed(torch.optim.AdamW):
    """AdamW with a linear warm-up over four steps, then a decline; ``held`` keeps the last rate."""

    def __init__(self, params, lr: float = 3e-3, held: bool = False):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.update(peak=lr, calls=0, held=held)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            calls = min(group["calls"], 5) if group["held"] else group["calls"]
            group["lr"] = group["peak"] * (calls / 4 if calls < 4 else (4 / calls) ** 0.5)
        return super().step(closure)


def warmed(model: nn.Module, wrong: bool = True) -> Optimizer:
    return Warmed(model.parameters(), held=wrong)


@case(
    "bug",
    "schedule",
    llama,
    module=EVERYWHERE,
    passes="update",
    optimizer=Warmed,
    candidate_optimizer=warmed,
)
def llama_rate_held_from_the_fifth_step(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The rate of the inverse square root stops falling after five steps, where it should go on."""
    return MegatronLlama(model)
