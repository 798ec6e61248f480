"""Two ports of DeepLabV3: a tree of forks with a pyramid of one norm, and patches with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifteenth_deeplab import RATES, Bottleneck, DeepLabV3, both_heads, street
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_deeplab", DeepLabV3, street, both_heads)


def joined(norms: list[nn.BatchNorm2d], *names: str) -> Tensor:
    """A row for each name: what all norms have under it."""
    return torch.stack([torch.cat([getattr(norm, name).detach() for norm in norms]) for name in names])


class Norm(nn.Module):
    """Batch norms side by side as one; of the kept variance ``lost`` samples are not counted."""

    def __init__(self, *norms: nn.BatchNorm2d):
        super().__init__()
        self.eps, self.rate, self.lost = norms[0].eps, norms[0].momentum, 1
        self.affine = leaf(joined(norms, "weight", "bias"))
        self.register_buffer("kept", joined(norms, "running_mean", "running_var"))

    def forward(self, x: Tensor) -> Tensor:
        center, spread = self.kept
        if self.training:
            spread, center = torch.var_mean(x, (0, 2, 3), correction=0)
            count = x[:, 0].numel()
            with torch.no_grad():
                self.kept.lerp_(torch.stack([center, spread * count / (count - self.lost)]), self.rate)
        factor = self.affine[0] * (spread + self.eps).rsqrt()
        return x * factor[:, None, None] + (self.affine[1] - center * factor)[:, None, None]


class Layer(nn.Module):
    """Convolve, normalise and, if ``bent``, rectify; the last of a head does the first only."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None, bent: bool = False):
        super().__init__()
        self.weight, self.bias = leaf(conv.weight), None if conv.bias is None else leaf(conv.bias)
        self.norm, self.bent = Norm(norm) if norm else nn.Identity(), bent
        self.step, self.rate, self.edge = conv.stride, conv.dilation[0], conv.kernel_size[0] // 2

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, self.step, self.edge * self.rate, self.rate)
        return F.relu(self.norm(x)) if self.bent else self.norm(x)


class Fork(nn.Module):
    """The ways of a block: one product for the entry of both, the projected one thinned out thereafter."""

    def __init__(self, block: Bottleneck):
        super().__init__()
        self.step, self.narrow, around = block.conv2.stride[0], block.conv1.out_channels, block.downsample
        self.entry = leaf(torch.cat([conv.weight for conv in (block.conv1, *(around or [])[:1])]).flatten(1))
        self.entry_norm, self.around_norm = Norm(block.bn1), Norm(around[1]) if around else None
        self.middle, self.widen = Layer(block.conv2, block.bn2, True), Layer(block.conv3, block.bn3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tensordot(self.entry, x, ([1], [1])).transpose(0, 1)
        if self.around_norm is not None:
            x = self.around_norm(y[:, self.narrow :, :: self.step, :: self.step])
        return F.relu(x + self.widen(self.middle(F.relu(self.entry_norm(y[:, : self.narrow])))))


class Pyramid(nn.Module):
    """The local branches under one norm; the context of an image is a vector that joins at the projection."""

    def __init__(self, aspp: nn.Module):
        super().__init__()
        point, *atrous, context = aspp.convs
        self.point, self.atrous = leaf(point[0].weight), pile(branch[0].weight for branch in atrous)
        self.local_norm = Norm(point[1], *(branch[1] for branch in atrous))
        self.context_norm = Norm(context[2])
        self.context, split = leaf(context[1].weight.flatten(1)), self.local_norm.affine.shape[1]
        self.mix, self.mix_norm = leaf(aspp.project[0].weight[:, :split]), Norm(aspp.project[1])
        self.mix_context = leaf(aspp.project[0].weight[:, split:].flatten(1).T)

    def forward(self, x: Tensor) -> Tensor:
        far = [F.conv2d(x, w, padding=r, dilation=r) for r, w in zip(RATES, self.atrous, strict=True)]
        near = F.relu(self.local_norm(torch.cat([F.conv2d(x, self.point), *far], 1)))
        whole = self.context_norm(F.linear(x.flatten(2).mean(2), self.context)[:, :, None, None])
        whole = F.relu(whole).flatten(1) @ self.mix_context
        return F.relu(self.mix_norm(F.conv2d(near, self.mix) + whole[:, :, None, None]))


class ForkedSegmenter(Port):
    """A trunk, a crown upon it, and a side branch."""

    def take(self, model: DeepLabV3) -> None:
        body, head, aux = model.backbone, model.classifier, model.aux_classifier
        low, high = Fork(body.layer2[0]), [Fork(block) for block in body.layer3]
        stem, pyramid = (Layer(body.conv1, body.bn1, True), nn.MaxPool2d(3, 2, 1)), Pyramid(head[0])
        self.trunk = nn.Sequential(*stem, Fork(body.layer1[0]), low)
        self.crown = nn.Sequential(*high, pyramid, Layer(head[1], head[2], True), Layer(head[4]))
        self.side = nn.Sequential(Layer(aux[0], aux[1], True), Layer(aux[3]))
        high[0].middle.rate = 2 if self.fault == "deeplab_last_stage_dilated_from_its_first_block" else 1
        low.widen.bent = self.fault == "deeplab_strided_block_rectified_before_the_sum"
        pyramid.context_norm.lost = 0 if self.fault == "deeplab_context_variance_kept_uncorrected" else 1

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low, size = self.trunk(x), x.shape[2:]
        corners = self.fault == "deeplab_auxiliary_scores_resized_by_corners"
        out = F.interpolate(self.crown(low), size, mode="bilinear", align_corners=False)
        return {"out": out, "aux": F.interpolate(self.side(low), size, None, "bilinear", corners)}


class PatchSegmenter(Port):
    """Images [N, H, W, C]; a convolution is a product of patches, all norms lie in one table."""

    def take(self, model: DeepLabV3) -> None:
        body, (aspp, *head), aux = model.backbone, model.classifier, model.aux_classifier
        blocks, (point, *atrous, context) = [*body.layer1, *body.layer2, *body.layer3], aspp.convs
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self.starts = torch.tensor([0, *(norm.num_features for norm in norms)]).cumsum(0).tolist()
        self.table = leaf(joined(norms, "weight", "bias"))
        self.register_buffer("kept", joined(norms, "running_mean", "running_var"))
        wide = [body.conv1, *(block.conv2 for block in blocks), head[0], aux[0]]
        self.wide = nn.ParameterList(leaf(m.weight.permute(2, 3, 1, 0).flatten(0, 2)) for m in wide)
        self.atrous = pile(branch[0].weight.permute(2, 3, 1, 0).flatten(0, 2) for branch in atrous)
        thin = [m for b in blocks for m in (b.conv1, b.conv3, *(b.downsample or [])[:1])]
        thin.extend([head[3], aux[3], point[0], context[1]])
        self.thin = nn.ParameterList(leaf(m.weight.flatten(1).T) for m in thin)
        self.mix = leaf(aspp.project[0].weight.flatten(1).T.unflatten(0, (len(aspp.convs), -1)))
        self.bias = pile(m.bias for m in (head[3], aux[3]))

    def norm(self, i: int, x: Tensor) -> Tensor:
        part = slice(self.starts[i], self.starts[i] + x.shape[-1])
        center, spread = self.kept[:, part]
        if self.training:
            count = x[..., 0].numel()
            spread, center = torch.var_mean(x.flatten(0, -2), 0, correction=0)
            if self.fault == "deeplab_batch_variance_is_a_mean_of_images" and i == 14:
                spread = x.flatten(1, 2).var(1, correction=0).mean(0)
            with torch.no_grad():
                self.kept[:, part].lerp_(torch.stack([center, spread * count / (count - 1)]), 0.1)
        return (x - center) / (spread + 1e-5).sqrt() * self.table[0, part] + self.table[1, part]

    def patches(self, x: Tensor, size: int = 3, stride: int = 1, rate: int = 1) -> Tensor:
        high, wide = x.shape[1:3]
        x, taps = F.pad(x, (0, 0, *[rate * (size // 2)] * 4)), range(0, size * rate, rate)
        return torch.cat([x[:, i : i + high : stride, j : j + wide : stride] for i in taps for j in taps], 3)

    def block(self, x: Tensor, i: int, stride: int = 1, rate: int = 1) -> Tensor:
        p, n, around = 3 * i, 4 * i + 1, x
        y = self.norm(n, x @ self.thin[p]).relu()
        y = self.norm(n + 1, self.patches(y, 3, stride, rate) @ self.wide[i + 1]).relu()
        if i < 3:
            around = x[:, ::stride, ::stride]
            if self.fault == "deeplab_strided_shortcut_averages_cells" and stride > 1:
                around = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride)).mean((2, 4))
            around = self.norm(n + 3, around @ self.thin[p + 2])
        return (self.norm(n + 2, y @ self.thin[p + 1]) + around).relu()

    def pyramid(self, x: Tensor) -> Tensor:
        far = [self.patches(x, rate=rate) @ w for rate, w in zip(RATES, self.atrous, strict=True)]
        near = self.norm(16, torch.cat([x @ self.thin[-2], *far], 3)).relu()
        pooled = x.mean((1, 2))
        if self.fault == "deeplab_context_pooled_without_gradient":
            pooled = pooled.detach()
        whole = self.norm(20, pooled @ self.thin[-1]).relu() @ self.mix[-1]
        return self.norm(21, near @ self.mix[:-1].flatten(0, 1) + whole[:, None, None]).relu()

    def scored(self, i: int, x: Tensor, size: torch.Size) -> Tensor:
        y = self.norm(22 + i, self.patches(x) @ self.wide[5 + i]).relu() @ self.thin[i - 4] + self.bias[i]
        for axis, old, new in zip((1, 2), y.shape[1:3], size, strict=True):
            at = ((torch.arange(new).to(y) + 0.5) * old / new - 0.5).clamp(0, old - 1)
            hat = (1 - (at[:, None] - torch.arange(old).to(y)).abs()).relu()
            y = torch.tensordot(y, hat, ([axis], [1])).movedim(3, axis)
        return y.movedim(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(0, self.patches(x.movedim(1, 3), 7, 2) @ self.wide[0]).relu()
        ahead = 0 if self.fault == "deeplab_stem_pool_padded_on_the_far_side_only" else 1
        y = F.pad(y, (0, 0, ahead, 1, ahead, 1)).unfold(1, 3, 2).unfold(2, 3, 2).amax((4, 5))
        low = self.block(self.block(y, 0), 1, stride=2)
        high = self.pyramid(self.block(self.block(low, 2), 3, rate=2))
        return {"out": self.scored(0, high, x.shape[2:]), "aux": self.scored(1, low, x.shape[2:])}


BLOCK, WAY, CONTEXT = "backbone.layer2.0", "backbone.layer2.0.downsample", "classifier.0.convs.4"
right(task, "deeplab_of_forks_and_a_pyramid_with_one_norm", "fused entries and norms", ForkedSegmenter)
right(task, "deeplab_by_patches_with_channels_last", "patches, norms in one table", PatchSegmenter)
wrong(
    task,
    ForkedSegmenter,
    deeplab_last_stage_dilated_from_its_first_block=("another dilation", "backbone.layer3.0.conv2"),
    deeplab_strided_block_rectified_before_the_sum=("an activation too many", (BLOCK, f"{BLOCK}.bn3")),
    deeplab_context_variance_kept_uncorrected=("biased variance", f"{CONTEXT}.2", ("buffer", "eval")),
    deeplab_auxiliary_scores_resized_by_corners=("aligned corners", ""),
)
wrong(
    task,
    PatchSegmenter,
    deeplab_batch_variance_is_a_mean_of_images=("statistics merged wrongly", "backbone.layer3.1.bn2"),
    deeplab_strided_shortcut_averages_cells=("means in place of pixels", (f"{WAY}.0", WAY)),
    deeplab_context_pooled_without_gradient=("a detach too many", (f"{CONTEXT}.0", CONTEXT), GRADIENTS),
    deeplab_stem_pool_padded_on_the_far_side_only=("padding on one side only", "backbone.maxpool"),
)
