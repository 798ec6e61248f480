"""Faults in single layers of networks on images: one channel, one group, one border, one dtype, one size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import Backward, own_backward
from bench.case import GRADIENTS, case, method_of
from bench.cases._heldout_fault_tasks import mobile, preact, unet, vgg
from bench.surgery import recast
from bench.tasks import autoencoder, cnn, resnet


@method_of("up1", "bug", "pixel shuffle", unet)
def upsampled_pixels_transposed(self, x):
    """A transposed conv as a product and a pixel shuffle; the two axes of each 2x2 patch are exchanged."""
    y = torch.einsum("nchw,coij->nojihw", x, self.weight).flatten(1, 3)
    return F.pixel_shuffle(y, 2) + self.bias[:, None, None]


def banded(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, halo: int) -> Tensor:
    """A 3x3 conv on two bands of rows that overlap by ``halo``; right for a halo of one."""
    half = x.shape[2] // 2
    top = F.conv2d(x[:, :, : half + halo], weight, bias, padding=1)[:, :, :half]
    bottom = F.conv2d(x[:, :, half - halo :], weight, bias, padding=1)[:, :, halo:]
    return torch.cat([top, bottom], 2)


@method_of("dec1.conv", "bug", "bands without overlap", unet, "_conv_forward")
def bands_without_a_halo(self, x, weight, bias):
    """The image goes through the conv in two bands that do not overlap."""
    return banded(self, x, weight, bias, 0)


@method_of("enc1.conv", "bug", "bands without overlap", unet, "_conv_forward", passes="eval")
def bands_without_a_halo_in_evaluation(self, x, weight, bias):
    """Bands are used in evaluation, where memory is short; right in training."""
    return banded(self, x, weight, bias, int(self.training))


@method_of("", "bug", "skip connection damped", unet, passes=GRADIENTS)
def skip_gradient_off_by_1e_4(self, x):
    """The gradient that comes back through the upper skip connection is 1e-4 too small."""
    fine = self.enc1(x)
    coarse = self.enc2(self.pool1(fine))
    x = self.up1(self.dec2(torch.cat([self.up2(self.middle(self.pool2(coarse))), coarse], 1)))
    return self.head(self.dec1(torch.cat([x, Backward.apply(fine, lambda g: g * (1 - 1e-4))], 1)))


@method_of("blocks.0.norm1", "bug", "norm folded in evaluation", mobile, passes="eval")
def eps_outside_the_root_in_evaluation(self, x):
    """In evaluation the norm is one scale and shift, whose eps is added to the deviation."""
    if self.training:
        return nn.BatchNorm2d.forward(self, x)
    scale = self.weight / (self.running_var.sqrt() + self.eps)
    return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


@method_of("blocks.0.act1", "bug", "branch of a derivative missing", mobile, passes="input gradient")
def hardswish_backward_beyond_three(self, x):
    """The derivative beyond +3 is that of the middle; few values are so large."""
    return own_backward(F.hardswish, lambda g, x: g * torch.where(x <= -3, 0, (2 * x + 3) / 6))(x)


@method_of("act1", "bug", "gradient of one channel", autoencoder, passes="input gradient")
def silu_gradient_of_one_channel(self, x):
    """The gradient of the fourth channel of eight is 1e-5 too large."""
    factor = 1 + 1e-5 * (torch.arange(x.shape[1], device=x.device) == 3).to(x.dtype)
    return nn.SiLU.forward(self, Backward.apply(x, lambda g: g * factor[:, None, None]))


def _with_weight_gradient(change) -> type[nn.Conv2d]:
    """A conv whose weight's gradient is altered."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, Backward.apply(weight, change), bias)

    return Conv


@case("bug", "weight gradient of one group", cnn, module="conv3", passes="weight gradient")
def weight_gradient_of_the_second_group(model):
    """The weight gradient of the second group is a millionth too large."""

    def change(g):
        return torch.cat([g[:8], g[8:] * (1 + 1e-6)])

    return recast(model, "conv3", _with_weight_gradient(change))


@case("bug", "weight gradient of one tap", resnet, module="layer2.0.conv2", passes="weight gradient")
def weight_gradient_of_one_corner(model):
    """One corner of the kernel gets no gradient in the last output channel, as under a loop one too short."""

    def change(g):
        g = g.clone()
        g[-1, :, 2, 2] = 0
        return g

    return recast(model, "layer2.0.conv2", _with_weight_gradient(change))


@method_of("pool1", "bug", "near ties", vgg, passes="input gradient")
def gradient_to_all_pixels_near_the_maximum(self, x):
    """The backward pass finds the maximum by a comparison with a tolerance of 1e-3."""
    y = nn.MaxPool2d.forward(self, x)
    spread = y.detach().repeat_interleave(2, 2).repeat_interleave(2, 3)
    near = (x.detach() >= spread - 1e-3).to(x.dtype)
    once = F.avg_pool2d(near * (x - x.detach()), 2, divisor_override=1)
    return y.detach() + once


@method_of("norm", "bug", "eps of the dtype", preact)
def eps_of_the_dtype(self, x):
    """The last BatchNorm takes the machine's eps of its input's dtype: another function in each dtype."""
    self.eps = torch.finfo(x.dtype).eps
    return nn.BatchNorm2d.forward(self, x)


@method_of("stem", "bug", "tiny factor in a third", preact, "_conv_forward")
def factor_of_1e_9_in_a_third(self, x, weight, bias):
    """A conv in three parts along its outputs; the last is 1e-9 too large, which float32 cannot hold."""
    parts = zip(weight.split(3), bias.split(3), (1, 1, 1 + 1e-9), strict=True)
    return torch.cat([F.conv2d(x, w, b, padding=1) * factor for w, b, factor in parts], 1)
