"""Right splits under an optimizer that treats each tensor as a whole, so that two halves are not one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim import Adafactor

from bench.case import in_place_of
from bench.cases._bug_parts import Halves
from bench.optimizers import ByHand
from bench.tasks import Task, autoencoder, mlp, resnet


class PerTensor(ByHand):
    """Gradient descent along ``direction``, which looks at each parameter as a whole."""

    def rule(self, p: Tensor, gradient: Tensor, state: dict, group: dict) -> None:
        p.sub_(group["lr"] * self.direction(p, gradient))


class Normalised(PerTensor):
    """Every parameter moves by lr, whatever the length of its gradient."""

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-12)


class Clipped(PerTensor):
    """The gradient of each parameter is clipped to a length of 0.005."""

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        return gradient * (0.005 / (gradient.norm() + 1e-12)).clamp(max=1)


class Lars(PerTensor):
    """The gradient is scaled by the ratio of the lengths of weight and gradient (You et al., 2017)."""

    def direction(self, p: Tensor, gradient: Tensor) -> Tensor:
        length = p.norm()
        return gradient * torch.where(length > 0, length / (gradient.norm() + 1e-12), 1)


def split(name: str, at: str, on: Task, optimizer: partial) -> None:
    """A case whose layer ``at`` is split into halves, rightly."""
    kind = "split under a per-tensor optimizer"
    in_place_of(at, "bug", kind, on, name, passes="update", optimizer=optimizer)(lambda layer: Halves(layer))


# Normalised, each half moves as far as the whole did; clipped, their shorter gradients are clipped less;
# Adafactor factors the second moments of each matrix and scales by its root mean square.
split("split_under_normalised_gradients", "fc2", mlp, partial(Normalised, lr=0.02))
split("split_under_clipping_by_tensor", "down2", autoencoder, partial(Clipped, lr=0.1))
split("split_under_lars", "layer2.0.conv2", resnet, partial(Lars, lr=0.01))
split("split_under_adafactor", "fc1", mlp, partial(Adafactor, lr=1e-2))
