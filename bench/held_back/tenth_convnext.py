"""Ports of a ConvNeXt V2: a tree of channels-first modules, and folded products over channels-last arrays."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._tenth_convnext import ConvNeXtBlock, ConvNeXtV2, LayerNorm2d, images, likelihood

classified = few("tenth_convnext", ConvNeXtV2, images, likelihood)


def pointwise(layer: nn.Linear) -> nn.Conv2d:
    """The same product over the channels of [N, C, H, W]."""
    conv = nn.Conv2d(layer.in_features, layer.out_features, 1)
    conv.weight, conv.bias = leaf(layer.weight[:, :, None, None]), leaf(layer.bias)
    return conv


class ChannelNorm(nn.Module):
    """Each pixel of [N, C, H, W] is normalised over its channels."""

    def __init__(self, norm: nn.LayerNorm, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.scale, self.shift = leaf(norm.weight[:, None, None]), leaf(norm.bias[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        spread = centred.square().mean(1, keepdim=True)
        return centred / torch.sqrt(spread + self.eps) * self.scale + self.shift


class Competition(nn.Module):
    """Global response normalization of [N, C, H, W]."""

    def __init__(self, norm: nn.Module, across_images: bool = False):
        super().__init__()
        self.over = (0, 1) if across_images else 1
        self.gain, self.offset = leaf(norm.weight[:, None, None]), leaf(norm.bias[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        strength = x.square().sum((2, 3), keepdim=True).sqrt()
        relative = strength / (strength.mean(self.over, keepdim=True) + 1e-6)
        return self.gain * (x * relative) + self.offset + x


class Residual(nn.Module):
    """The block at (level, index): a wide depthwise filter, then pointwise ones around the competition."""

    def __init__(self, block: ConvNeXtBlock, at: tuple[int, int], fault: str):
        super().__init__()
        self.at, self.fault = at, fault
        self.filter, self.norm = deepcopy(block.conv_dw), ChannelNorm(block.norm)
        self.widen, self.narrow = pointwise(block.mlp.fc1), pointwise(block.mlp.fc2)
        across = fault == "late_response_compared_across_the_images" and at == (2, 0)
        self.compete = Competition(block.mlp.grn, across_images=across)
        self.strength = None if block.gamma is None else leaf(block.gamma[:, None, None])

    def branch(self, x: Tensor) -> Tensor:
        if self.fault == "wide_filter_sees_repeated_edges" and self.at == (0, 1):
            edged = F.pad(x, (3, 3, 3, 3), mode="replicate")
            x = F.conv2d(edged, self.filter.weight, self.filter.bias, groups=x.shape[1])
        else:
            x = self.filter(x)
        x = self.widen(self.norm(x))
        quick = self.fault == "quick_gelu_in_one_convnext_block" and self.at == (1, 2)
        return self.narrow(self.compete(x * torch.sigmoid(1.702 * x) if quick else F.gelu(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        return x + y if self.strength is None else x + self.strength * y


class Pyramid(Port):
    """The way into each level, its residual blocks, and the classifier on the mean pixel."""

    def take(self, model: ConvNeXtV2) -> None:
        conv, norm = model.stem
        eps = 1e-3 if self.fault == "convnext_stem_norm_with_the_epsilon_of_keras" else 1e-6
        halvings = [(ChannelNorm(s.downsample[0]), deepcopy(s.downsample[1])) for s in model.stages[1:]]
        self.entries = nn.ModuleList(
            [nn.Sequential(deepcopy(conv), ChannelNorm(norm, eps)), *(nn.Sequential(*h) for h in halvings)]
        )
        self.levels = nn.ModuleList(
            nn.Sequential(*(Residual(block, (i, j), self.fault) for j, block in enumerate(stage.blocks)))
            for i, stage in enumerate(model.stages)
        )
        self.final, self.classify = ChannelNorm(model.head.norm), deepcopy(model.head.fc)

    def forward(self, x: Tensor) -> Tensor:
        for entry, level in zip(self.entries, self.levels, strict=True):
            x = level(entry(x))
        if self.fault == "convnext_norm_ahead_of_the_pooling":
            x = self.final(x).mean((2, 3), keepdim=True)
        else:
            x = self.final(x.mean((2, 3), keepdim=True))
        return self.classify(x.flatten(1))


def affine(norm: nn.LayerNorm | LayerNorm2d) -> Tensor:
    return torch.stack([norm.weight, norm.bias])


def unit(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Folded(Port):
    """Arrays [N, H, W, C]; a stage's blocks share stacked weights, norms and scales join the products."""

    def take(self, model: ConvNeXtV2) -> None:
        self.depths = [len(stage.blocks) for stage in model.stages]
        convs = [model.stem[0], *(s.downsample[1] for s in model.stages[1:])]
        norms = [model.stem[1], *(s.downsample[0] for s in model.stages[1:]), model.head.norm]
        w = {f"norm{i}": leaf(affine(norm)) for i, norm in enumerate(norms)}
        w |= {"head": leaf(model.head.fc.weight.T), "head_b": leaf(model.head.fc.bias)}
        w["scale1"] = pile(block.gamma for block in model.stages[1].blocks)
        for i, (conv, stage) in enumerate(zip(convs, model.stages, strict=True)):
            mlps = [block.mlp for block in stage.blocks]
            w |= {
                f"enter{i}": leaf(conv.weight.permute(2, 3, 1, 0)),
                f"enter_b{i}": leaf(conv.bias),
                f"window{i}": pile(block.conv_dw.weight[:, 0] for block in stage.blocks),
                f"window_b{i}": pile(block.conv_dw.bias for block in stage.blocks),
                f"inner{i}": pile(affine(block.norm) for block in stage.blocks),
                f"up{i}": pile(m.fc1.weight.T for m in mlps),
                f"up_b{i}": pile(m.fc1.bias for m in mlps),
                f"respond{i}": pile(torch.stack([m.grn.weight, m.grn.bias]) for m in mlps),
                f"down{i}": pile(m.fc2.weight.T for m in mlps),
                f"down_b{i}": pile(m.fc2.bias for m in mlps),
            }
        self.w = nn.ParameterDict(w)

    def enter(self, i: int, x: Tensor) -> Tensor:
        """Squares of pixels, side by side, become one pixel each."""
        kernel = self.w[f"enter{i}"]
        size = len(kernel)
        if self.fault == "last_convnext_halving_reads_columns_as_rows" and i == 2:
            kernel = kernel.transpose(0, 1)
        tiles = x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3).flatten(3)
        return tiles @ kernel.flatten(0, 2) + self.w[f"enter_b{i}"]

    def block(self, i: int, j: int, x: Tensor) -> Tensor:
        def own(key: str) -> Tensor:
            return self.w[f"{key}{i}"][j]

        windows = F.pad(x, (0, 0, 3, 3, 3, 3)).unfold(1, 7, 1).unfold(2, 7, 1)
        y = torch.einsum("nhwcuv,cuv->nhwc", windows, own("window")) + own("window_b")
        if self.fault == "first_convnext_shortcut_starts_behind_the_filter" and (i, j) == (0, 0):
            x = y
        (gain, shift), up = own("inner"), own("up")
        y = F.gelu(unit(y) @ (gain[:, None] * up) + (shift @ up + own("up_b")))
        (gain, shift), down, offset = own("respond"), own("down"), own("down_b")
        strength = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        y = y * (1 + gain * strength / (strength.mean(3, keepdim=True) + 1e-6)) + shift
        if i == 1:
            scale = own("scale")
            if self.fault == "convnext_layer_scale_learns_nothing" and j == 1:
                scale = scale.detach()
            down, offset = down * scale, offset * scale
        return x + y @ down + offset

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, 3)
        for i, depth in enumerate(self.depths):
            gain, shift = self.w[f"norm{i}"]
            x = unit(self.enter(0, x)) * gain + shift if i == 0 else self.enter(i, unit(x) * gain + shift)
            for j in range(depth):
                x = self.block(i, j, x)
        gain, shift = self.w[f"norm{len(self.depths)}"]
        return (unit(x.mean((1, 2))) * gain + shift) @ self.w["head"] + self.w["head_b"]


right(classified, "convnext_as_a_pyramid", "modules of another tree, channels first throughout", Pyramid)
right(classified, "convnext_with_folded_products", "stacked weights, norms folded into products", Folded)
wrong(
    classified,
    Pyramid,
    convnext_stem_norm_with_the_epsilon_of_keras=("wrong epsilon", "stem.1"),
    wide_filter_sees_repeated_edges=("another padding", "stages.0.blocks.1.conv_dw"),
    quick_gelu_in_one_convnext_block=("approximate activation", "stages.1.blocks.2.mlp.act"),
    late_response_compared_across_the_images=("mean over the batch too", "stages.2.blocks.0.mlp.grn"),
    convnext_norm_ahead_of_the_pooling=("order of two steps", ("head", "head.global_pool", "head.norm")),
)
wrong(
    classified,
    Folded,
    first_convnext_shortcut_starts_behind_the_filter=("residual from the wrong place", "stages.0.blocks.0"),
    convnext_layer_scale_learns_nothing=("a detach too many", "stages.1.blocks.1", "weight gradient"),
    last_convnext_halving_reads_columns_as_rows=("kernel transposed", "stages.2.downsample.1"),
)
