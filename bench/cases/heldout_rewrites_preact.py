"""True rewrites of a pre-activation ResNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.cases._heldout_parts import flat_name
from bench.cases._heldout_tasks import PreActNet, preact
from bench.cases._rewritten import SAME, copied


@method_of("block2", SAME, "conv and shortcut in one", preact)
def shortcut_in_the_centre_of_the_kernel(self, x: Tensor) -> Tensor:
    """A 3x3 conv and the 1x1 shortcut beside it as one conv; the shortcut sits in the kernel's centre."""
    active = F.relu(self.norm1(x))
    kernel = torch.cat([self.conv1.weight, F.pad(self.shortcut.weight, (1, 1, 1, 1))])
    main, skip = F.conv2d(active, kernel, stride=2, padding=1).chunk(2, 1)
    return skip + self.conv2(F.relu(self.norm2(main)))


class _NormReLU(torch.autograd.Function):
    """GroupNorm and ReLU in one pass, and in one pass backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        grouped = x.reshape(len(x), groups, -1)
        variance, mean = torch.var_mean(grouped, 2, correction=0, keepdim=True)
        inverse = (variance + eps).rsqrt()
        hat = ((grouped - mean) * inverse).view(x.shape)
        y = torch.relu(hat * weight[:, None, None] + bias[:, None, None])
        ctx.save_for_backward(hat, inverse, weight, y > 0)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        hat, inverse, weight, positive = ctx.saved_tensors
        grad = grad * positive
        scaled = (grad * weight[:, None, None]).reshape(len(grad), inverse.shape[1], -1)
        grouped = hat.reshape(scaled.shape)
        along = grouped * (scaled * grouped).mean(2, keepdim=True)
        back = inverse * (scaled - scaled.mean(2, keepdim=True) - along)
        return back.view(grad.shape), (grad * hat).sum((0, 2, 3)), grad.sum((0, 2, 3)), None, None


@method_of("norm", SAME, "own backward", preact)
def group_norm_with_the_relu_inside(self, x: Tensor) -> Tensor:
    """The last norm applies the ReLU as well, with its own backward; the ReLU behind it has nothing to do."""
    return _NormReLU.apply(x, self.weight, self.bias, self.num_groups, self.eps)


@in_place_of("", SAME, "vmap over the samples", preact, "one_sample_under_vmap")
class OneSampleUnderVmap(PreActNet):
    """The network is written for one image and mapped over the batch by ``torch.func.vmap``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.one)(x)

    def one(self, image: Tensor) -> Tensor:
        return super().forward(image[None])[0]


@in_place_of("", SAME, "network of a ParameterDict", preact, "preact_of_a_parameter_dict")
class _FlatPreAct(nn.Module):
    """No modules at all: a dict of weights with flat names, functional calls, ReLU in place."""

    def __init__(self, model: PreActNet):
        super().__init__()
        named = {flat_name(name): copied(values) for name, values in model.named_parameters()}
        self.weights = nn.ParameterDict(named)

    def active(self, x: Tensor, name: str) -> Tensor:
        x = F.group_norm(x, 4, self.weights[f"{name}_weight"], self.weights[f"{name}_bias"])
        return x.relu_()

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        x = F.conv2d(x, w["stem_weight"], padding=1)
        y = self.active(
            F.conv2d(self.active(x, "block1_norm1"), w["block1_conv1_weight"], None, 1, 1), "block1_norm2"
        )
        x = F.conv2d(y, w["block1_conv2_weight"], padding=1) + x
        x = self.active(x, "block2_norm1")
        y = self.active(F.conv2d(x, w["block2_conv1_weight"], None, 2, 1), "block2_norm2")
        x = F.conv2d(y, w["block2_conv2_weight"], padding=1) + F.conv2d(
            x, w["block2_shortcut_weight"], None, 2
        )
        pooled = F.adaptive_avg_pool2d(self.active(x, "norm"), 1).flatten(1)
        return torch.addmm(w["fc_bias"], pooled, w["fc_weight"].T)
