"""Right pairs out of peft: its adapters against short ones of our own."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn

from bench.real_bugs import right_pair
from bench.surgery import replace
from bench.tasks import MLP, _classes, _task

pair = partial(right_pair, "https://github.com/huggingface/peft", f"peft {version('peft')}")
TARGETS = ["fc1", "fc2"]


def _adapted(config: object) -> nn.Module:
    """With adapters that do something from the start."""
    model = get_peft_model(MLP(), config)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, float("ia3" in name), 0.2)
    return model


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 20), _classes(12, 5)


lora = _task("lora", lambda: _adapted(LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS)), _batch)
rslora = _task(
    "rslora", lambda: _adapted(LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, use_rslora=True)), _batch
)
dora = _task(
    "dora", lambda: _adapted(LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, use_dora=True)), _batch
)
ia3 = _task("ia3", lambda: _adapted(IA3Config(target_modules=TARGETS, feedforward_modules=[])), _batch)


class LoRA(nn.Module):
    def __init__(self, own: nn.Module):
        super().__init__()
        self.base, self.scale = own.base_layer, own.scaling["default"]
        self.a, self.b = own.lora_A["default"].weight, own.lora_B["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


class Merged(LoRA):
    """The product is added to the weight at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.scale * self.b @ self.a, self.base.bias)


class DoRA(LoRA):
    """Liu et al. 2024: the merged weight's direction, with a learned length; no gradient through the norm."""

    def __init__(self, own: nn.Module):
        super().__init__(own)
        self.length = own.lora_magnitude_vector["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.scale * self.b @ self.a
        scale = self.length / torch.linalg.vector_norm(weight, dim=1).detach()
        return F.linear(x, weight * scale[:, None], self.base.bias)


class IA3(nn.Module):
    def __init__(self, own: nn.Module):
        super().__init__()
        self.base, self.gain = own.base_layer, own.ia3_l["default"]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight * self.gain, self.base.bias * self.gain[:, 0])


def _each(model: nn.Module, make: type[nn.Module]) -> nn.Module:
    for name, part in list(model.named_modules()):
        if name.endswith(tuple(TARGETS)):
            model = replace(model, name, make(part))
    return model


@pair(lora)
def lora_of_our_own(model: nn.Module) -> nn.Module:
    return _each(model, LoRA)


@pair(lora)
def lora_merged_at_each_call(model: nn.Module) -> nn.Module:
    return _each(model, Merged)


@pair(rslora)
def rslora_of_our_own(model: nn.Module) -> nn.Module:
    return _each(model, LoRA)


@pair(dora)
def dora_of_our_own(model: nn.Module) -> nn.Module:
    return _each(model, DoRA)


@pair(ia3)
def ia3_of_our_own(model: nn.Module) -> nn.Module:
    return _each(model, IA3)
