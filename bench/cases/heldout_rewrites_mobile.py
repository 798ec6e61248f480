"""True rewrites of a MobileNet and of a VGG with dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_tasks import VGG, SqueezeExcite, mobile, vgg
from bench.cases._rewritten import SAME, copied, linear_of
from bench.surgery import recast

EXCITES = ("block1.excite", "block2.excite")


@in_place_of(EXCITES, SAME, "1x1 convs on one pixel as matrices", mobile, "squeeze_and_excite_by_matrices")
class _Gate(nn.Module):
    """Both blocks weigh their channels by two products with vectors, the first applied from the right."""

    def __init__(self, block: SqueezeExcite):
        super().__init__()
        self.squeeze = copied(block.reduce.weight.flatten(1).T)
        self.squeeze_bias = copied(block.reduce.bias)
        self.excite = linear_of(block.expand.weight.flatten(1), block.expand.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x.flatten(2).mean(2) @ self.squeeze + self.squeeze_bias)
        return torch.einsum("nchw,nc->nchw", x, F.hardsigmoid(self.excite(hidden)))


@case(SAME, "activation by formula", on=mobile)
def hardswish_by_clamp(model: nn.Module) -> nn.Module:
    """x clamp(x / 6 + 1/2, 0, 1), and ReLU6 by ``hardtanh_`` in place."""

    class Hardswish(nn.Hardswish):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x / 6 + 0.5).clamp(0, 1)

    class ReLU6(nn.ReLU6):
        def forward(self, x: Tensor) -> Tensor:
            return F.hardtanh_(x, 0.0, 6.0)

    for name in ("act", "block2.act1", "block2.act2"):
        recast(model, name, Hardswish)
    return recast(recast(model, "block1.act1", ReLU6), "block1.act2", ReLU6)


@method_of(("bn", "block1.bn2"), SAME, "statistics of shards combined", mobile)
def batch_norm_over_two_shards(self, x: Tensor) -> Tensor:
    """Mean and variance of uneven shards of the batch are combined, as synchronised BatchNorm does."""
    if not self.training:
        return nn.BatchNorm2d.forward(self, x)
    shards = x.split([5, len(x) - 5])
    counts = [len(shard) * x[0, 0].numel() for shard in shards]
    parts = [torch.var_mean(shard, (0, 2, 3), correction=0) for shard in shards]
    total = sum(counts)
    mean = sum(n * m for n, (_, m) in zip(counts, parts, strict=True)) / total
    within = sum(n * (v + (m - mean) ** 2) for n, (v, m) in zip(counts, parts, strict=True))
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean += self.momentum * (mean - self.running_mean)
        self.running_var += self.momentum * (within / (total - 1) - self.running_var)
    scale = self.weight * torch.rsqrt(within / total + self.eps)
    return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


@method_of(("block1", "block2"), SAME, "convs by einsum", mobile)
def inverted_residual_by_einsum(self, x: Tensor) -> Tensor:
    """The 1x1 convs by ``einsum``, the depthwise conv on windows from ``unfold``; all in one forward."""
    y = torch.einsum("oi,nihw->nohw", self.expand.weight[:, :, 0, 0], x)
    y = F.pad(self.act1(self.bn1(y)), (1, 1, 1, 1))
    windows = y.unfold(2, 3, self.depthwise.stride[0]).unfold(3, 3, self.depthwise.stride[0])
    y = torch.einsum("nchwij,cij->nchw", windows, self.depthwise.weight[:, 0])
    y = self.excite(self.act2(self.bn2(y)))
    y = self.bn3(torch.einsum("oi,nihw->nohw", self.project.weight[:, :, 0, 0], y))
    return y.add_(x) if self.residual else y


@case(SAME, "features flattened in another order", on=vgg)
def features_flattened_channels_last_with_the_weight(model: nn.Module) -> nn.Module:
    """The features are flattened row, column, channel, and the next weight's columns are moved likewise."""

    class ChannelsLast(VGG):
        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x).permute(0, 2, 3, 1).flatten(1))

    first = model.classifier[0]
    first.weight = copied(first.weight.unflatten(1, (12, 4, 4)).permute(0, 2, 3, 1).flatten(1))
    return recast(model, "", ChannelsLast)


@case(("bit_identical", "round_off"), "dropout, same draws", on=vgg)
def dropout_as_a_mask_of_ones(model: nn.Module) -> nn.Module:
    """Both dropouts drop ones, in the order of before, and the features are multiplied by what is left."""

    class Mask(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.dropout(torch.ones_like(x), self.p, self.training)

    class ChannelMask(nn.Dropout2d):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.dropout(x.new_ones(*x.shape[:2], 1, 1), self.p, self.training)

    return recast(recast(model, "classifier.2", Mask), "features.5", ChannelMask)


@case(SAME, "dropout moved past a product", on=vgg)
def hidden_dropout_before_the_relu(model: nn.Module) -> nn.Module:
    """Dropout and ReLU change places: both keep zeros, and the draws are the same."""
    layers = model.classifier
    model.classifier = nn.Sequential(layers[0], layers[2], nn.ReLU(), layers[3])
    return model


@method_of("features.4", SAME, "max-pool by index", vgg)
def max_pool_by_gathering(self, x: Tensor) -> Tensor:
    """The first pooling finds the places of the maxima without a graph and gathers there."""
    with torch.no_grad():
        _, places = F.max_pool2d(x, self.kernel_size, return_indices=True)
    return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)


@in_place_of("", SAME, "copies on the way", vgg, "vgg_in_two_stages_with_copies")
class VggInTwoStagesWithCopies(nn.Module):
    """The same layers in two named stages, with copies and layouts changed on the way for no reason."""

    def __init__(self, model: VGG):
        super().__init__()
        self.stage = nn.ModuleDict({"low": model.features[:6], "high": model.features[6:]})
        self.top = model.classifier

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage["low"](x.contiguous(memory_format=torch.channels_last))
        x = self.stage["high"](x.clone(memory_format=torch.contiguous_format))
        return self.top(torch.flatten(x.contiguous(), 1)).clone()
