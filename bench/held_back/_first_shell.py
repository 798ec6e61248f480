"""A shell of two residual layers for mixers of sequences, and its port."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import leaf, pile
from bench.tasks import Task, _task

W = 16


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(W), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Shell(nn.Module):
    """[N, T, 6] -> [N, 4]."""

    def __init__(self, mixer: Callable[[], nn.Module]):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, W), nn.Linear(W, 4)
        self.layers = nn.Sequential(Layer(mixer()), Layer(mixer()))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(x)).mean(1))


class Flat(nn.Module):
    """The shell as functions on a few stacked tensors, batch first or time first; a list of mixers."""

    def __init__(self, model: Shell, mixers: list[nn.Module], time_first: bool):
        super().__init__()
        self.time_first, self.steps = time_first, nn.ModuleList(mixers)
        self.ends = nn.ParameterList(leaf(p) for f in (model.enter, model.leave) for p in f.parameters())
        self.norms = pile(torch.stack([each.norm.weight, each.norm.bias]) for each in model.layers)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.ends
        x = F.linear(x.transpose(0, 1) if self.time_first else x, a, b)
        for (scale, shift), step in zip(self.norms, self.steps, strict=True):
            x = step(F.layer_norm(x, (W,), scale, shift)) + x
        return F.linear(x.mean(1 - int(self.time_first)), c, d)


def shell(name: str, mixer: Callable[[], nn.Module]) -> Task:
    return _task(name, lambda: Shell(mixer), lambda: (torch.randn(6, 9, 6), torch.randint(4, (6,))))


def ported(mixer: Callable, time_first: bool = False) -> Callable:
    """A maker of the port whose mixers are ``mixer(of the reference, wrong)``."""

    def make(model: Shell, wrong: bool) -> Flat:
        return Flat(model, [mixer(each.mixer, wrong) for each in model.layers], time_first)

    make.__module__ = mixer.__module__
    return make
