"""Right splits under an optimizer that treats each tensor as a whole, so that two halves are not one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import Halves
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, mlp, resnet

KIND = "split under a per-tensor optimizer"


class PerTensor(torch.optim.Optimizer):
    """Gradient descent along ``direction``, which looks at each parameter as a whole."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad))


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


@case("bug", KIND, mlp, module="fc2", passes="update", optimizer=partial(Normalised, lr=0.02))
def split_under_normalised_gradients(model):
    """Normalised by tensor: each half moves as far as the whole did."""
    return replace(model, "fc2", Halves(model.fc2))


@case("bug", KIND, autoencoder, module="down2", passes="update", optimizer=partial(Clipped, lr=0.1))
def split_under_clipping_by_tensor(model):
    """Clipped by tensor: the halves have shorter gradients, which are clipped less."""
    return replace(model, "down2", Halves(model.down2))


@case("bug", KIND, resnet, module="layer2.0.conv2", passes="update", optimizer=partial(Lars, lr=0.01))
def split_under_lars(model):
    """LARS takes the ratio of lengths by tensor."""
    return replace(model, "layer2.0.conv2", Halves(model.layer2[0].conv2))


@case("bug", KIND, mlp, module="fc1", passes="update", optimizer=partial(torch.optim.Adafactor, lr=1e-2))
def split_under_adafactor(model):
    """Adafactor factors the second moments of each matrix and scales by its root mean square."""
    return replace(model, "fc1", Halves(model.fc1))
