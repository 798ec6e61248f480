"""True rewrites of networks of which a part is frozen: the backbone, or BatchNorm's statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_images import Transfer, fine_tuned, transfer
from bench.cases._rewritten import SAME, copied, rewritten
from bench.surgery import recast


class _Constants(nn.Module):
    """The backbone with all that it knows as buffers."""

    def __init__(self, backbone: nn.Sequential):
        super().__init__()
        self.eps = backbone[1].eps
        for i, (conv, bn) in enumerate([(backbone[0], backbone[1]), (backbone[3], backbone[4])]):
            self.register_buffer(f"kernel{i}", conv.weight.detach().clone())
            for name in ("running_mean", "running_var", "weight", "bias"):
                self.register_buffer(f"{name}{i}", getattr(bn, name).detach().clone())

    def norm(self, x: Tensor, i: int) -> Tensor:
        scale = getattr(self, f"weight{i}") * (getattr(self, f"running_var{i}") + self.eps).rsqrt()
        shift = getattr(self, f"bias{i}") - getattr(self, f"running_mean{i}") * scale
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(F.conv2d(x, self.kernel0, stride=2, padding=1), 0))
        return F.relu(self.norm(F.conv2d(x, self.kernel1, padding=1), 1))


@case(SAME, "frozen weights as buffers", on=transfer)
def backbone_of_buffers(model: nn.Module) -> nn.Module:
    """The frozen weights are buffers, no parameters; BatchNorm is one multiplication and one addition."""

    class Plain(Transfer):
        def train(self, mode: bool = True) -> nn.Module:
            return nn.Module.train(self, mode)

    return recast(rewritten(model, "backbone", _Constants), "", Plain)


@in_place_of("backbone", SAME, "BatchNorm folded into the conv", transfer, "frozen_norms_folded_at_each_call")
class _Folded(nn.Module):
    """The frozen norms scale the weights of the convs before them at each call, in today's dtype."""

    def __init__(self, backbone: nn.Sequential):
        super().__init__()
        self.layers = backbone

    def forward(self, x: Tensor) -> Tensor:
        for conv, bn, act in (self.layers[:3], self.layers[3:]):
            scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
            kernel = conv.weight * scale[:, None, None, None]
            x = act(F.conv2d(x, kernel, bn.bias - bn.running_mean * scale, conv.stride, conv.padding))
        return x


@method_of("", SAME, "linear layer past the mean", transfer)
def head_before_the_activation_of_the_mean(self, x: Tensor) -> Tensor:
    """The head's first layer is applied to every pixel and its mean taken after: both are linear."""
    pixels = self.backbone(x).flatten(2).mT
    return self.fc2(self.fc1(pixels).mean(1).tanh())


@in_place_of(
    ("bn1", "bn2"), SAME, "frozen BatchNorm by hand", fine_tuned, "frozen_batch_norm_by_scale_and_shift"
)
class _FrozenNorm(nn.Module):
    """The same in both modes, no batches counted, as in detection networks; scale and shift are trained."""

    def __init__(self, bn: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.bias, self.eps = copied(bn.weight), copied(bn.bias), bn.eps
        self.register_buffer("running_mean", bn.running_mean.clone())
        self.register_buffer("running_var", bn.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


@method_of("", SAME, "BatchNorm folded into the conv", fine_tuned)
def trained_convs_with_frozen_statistics_folded(self, x: Tensor) -> Tensor:
    """Each conv's weight is scaled by its norm at each call; both weights are trained through the product."""
    for conv, bn in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
        scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        shift = bn.bias - scale * bn.running_mean
        kernel = torch.einsum("o,oihw->oihw", scale, conv.weight)
        x = F.relu(F.conv2d(x, kernel, shift, conv.stride, conv.padding), inplace=True)
    return self.fc(x.mean((2, 3)))


@method_of("bn2", SAME, "frozen BatchNorm by another norm", fine_tuned)
def frozen_norm_by_a_depthwise_conv(self, x: Tensor) -> Tensor:
    """A norm of fixed statistics as a 1x1 conv of each channel by itself, on the centred input."""
    kernel = (self.weight / (self.running_var + self.eps).sqrt())[:, None, None, None]
    centred = x - self.running_mean[:, None, None]
    return F.conv2d(centred, kernel, self.bias, groups=self.num_features)
