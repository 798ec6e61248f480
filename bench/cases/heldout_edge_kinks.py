"""Right, but suspicious: other choices at ties and at kinks that no input meets, and leaps through kinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from bench.case import case, method_of
from bench.cases._heldout_images import FineTuned, fine_tuned, unet
from bench.cases._heldout_sequences import temporal
from bench.cases._heldout_tables import codebook, moe
from bench.cases._heldout_tasks import mobile, vgg
from bench.cases._rewritten import SAME, rewritten
from bench.cases.heldout_rewrites_tables import _StackedExperts
from bench.surgery import recast


def _fast(params) -> SGD:
    return SGD(params, lr=0.3, momentum=0.9)


@method_of("act", SAME, "another derivative at zero", unet)
def relu_by_clamp(self, x: Tensor) -> Tensor:
    """``clamp_min`` passes the gradient at zero itself, where ReLU stops it; no sum is ever exactly zero."""
    return x.clamp_min(0)


@method_of(("features.1", "classifier.1"), SAME, "another derivative at zero", vgg)
def relu_by_the_maximum_of_two(self, x: Tensor) -> Tensor:
    """``maximum`` with a zero passes half of the gradient at zero itself."""
    return torch.maximum(x, x.new_zeros(()))


@method_of(("blocks.0", "blocks.2"), SAME, "another derivative at zero", temporal)
def relu_by_half_of_the_sum_with_its_size(self, x: Tensor) -> Tensor:
    """(y + |y|) / 2, whose derivative at zero is a half."""
    y = self.conv(x)[..., : x.shape[2]]
    return x + (y + y.abs()) / 2


@case(SAME, "another derivative at the corners", on=mobile)
def relu6_by_two_cuts(model: nn.Module) -> nn.Module:
    """6 - ReLU(6 - ReLU(x)), and Hardswish by cases; they differ from the library's at the corners alone."""

    class ReLU6(nn.ReLU6):
        def forward(self, x: Tensor) -> Tensor:
            return 6 - F.relu(6 - x.clamp(min=0))

    class Hardswish(nn.Hardswish):
        def forward(self, x: Tensor) -> Tensor:
            middle = x * (x + 3) / 6
            return torch.where(x >= 3, x, torch.where(x < -3, torch.zeros_like(x), middle))

    for name in ("block1.act1", "block1.act2"):
        recast(model, name, ReLU6)
    for name in ("act", "block2.act1", "block2.act2"):
        recast(model, name, Hardswish)
    return model


@method_of("moe", SAME, "other choice among ties", moe)
def router_chooses_by_sorting(self, x: Tensor) -> Tensor:
    """The two best experts by a sort of the scores turned round: among equals it would take the last."""
    scores = self.router(x)
    best, chosen = scores.flip(1).sort(dim=1, descending=True, stable=True)
    weights, chosen = best[:, :2].softmax(1), 3 - chosen[:, :2]
    y = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        share = (weights * (chosen == index)).sum(1)
        rows = share.nonzero().squeeze(1)
        y = y.index_add(0, rows, expert(x[rows]) * share[rows, None])
    return y


@method_of("", SAME, "other choice among ties", codebook, "nearest")
def nearest_code_from_the_end(self, z: Tensor) -> Tensor:
    """The nearest code by the largest negated distance, counted from the end of the book."""
    apart = (z[:, None] - self.codes.weight.flip(0)).square().sum(2)
    return 7 - apart.neg().max(1).indices


@case("round_off", "leap through a kink", on=fine_tuned, steps=60)
def convs_as_products_of_windows(model: nn.Module) -> nn.Module:
    """Two convs as products of windows: a sum next to zero changes sign in float32, and the curves part."""

    def windows(x: Tensor, conv: nn.Conv2d) -> Tensor:
        rows = F.unfold(x, 3, padding=1, stride=conv.stride).mT @ conv.weight.flatten(1).T
        return rows.mT.unflatten(2, (x.shape[2] // conv.stride[0], -1))

    class Windows(FineTuned):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn1(windows(x, self.conv1)))
            return self.fc(F.relu(self.bn2(windows(x, self.conv2))).mean((2, 3)))

    return recast(model, "", Windows)


@case(SAME, "high but stable rate", on=moe, steps=100, optimizer=_fast)
def gathered_experts_at_a_high_rate(model: nn.Module) -> nn.Module:
    """Experts gathered row by row, at three times the usual rate; rows go from expert to expert meanwhile."""
    return rewritten(model, "moe", _StackedExperts)


@method_of("", "round_off", "sum of cancelling terms", unet)
def pooling_by_an_integral_image(self, x: Tensor) -> Tensor:
    """The mean of 2x2 pixels as a difference of running sums: right, with a few bits more of rounding."""
    skip = self.act(self.down1(x))
    sums = F.pad(skip, (1, 0, 1, 0)).cumsum(2).cumsum(3)[..., ::2, ::2]
    pooled = sums.diff(dim=2).diff(dim=3) / 4
    low = self.act(self.middle(self.act(self.down2(pooled))))
    return self.head(self.act(self.join(torch.cat([self.upsample(low), skip], 1))))


@method_of("", "round_off", "sum of cancelling terms", temporal, "past")
def mean_of_the_past_by_what_is_to_come(self, x: Tensor) -> Tensor:
    """The sum of the past as the whole sum less what is still to come."""
    coming = x.flip(2).cumsum(2).flip(2) - x
    past = x.sum(2, keepdim=True) - coming
    return past / torch.arange(1, x.shape[2] + 1).to(x)
