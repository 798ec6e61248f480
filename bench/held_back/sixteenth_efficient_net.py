"""Two ports of a thin EfficientNet: TensorFlow's kernels in folding units, and packed weights by windows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixteenth_efficient_net import EfficientNet, classified, images
from bench.held_back._sixth_ports import few

task = few("sixteenth_efficient_net", EfficientNet, images, classified)


class Swish(torch.autograd.Function):
    """x * sigmoid(x) that keeps its input alone."""

    @staticmethod
    def forward(ctx, x: Tensor, plain: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.plain = plain
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        y = x * s
        return grad * (y + s * (1 - (s if ctx.plain else y))), None


class Unit(nn.Module):
    """A kernel [k, k, I, O] and its norm, which is folded into the kernel in eval mode."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, bend: bool = True):
        super().__init__()
        self.each, self.stride, self.bend = conv.groups > 1, conv.stride[0], bend
        self.kernel = leaf(conv.weight.permute((2, 3, 0, 1) if self.each else (2, 3, 1, 0)))
        self.gain, self.shift = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("center", norm.running_mean.clone())
        self.register_buffer("spread", norm.running_var.clone())
        self.alike = self.bare = self.plain = False

    def edges(self, size: int) -> tuple[int, int]:
        reach = len(self.kernel)
        missing = max(reach - (size % self.stride or self.stride), 0)
        return (reach // 2, reach // 2) if self.alike else (missing // 2, missing - missing // 2)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = F.pad(x, (*self.edges(x.shape[3]), *self.edges(x.shape[2])))
        return F.conv2d(x, weight, bias, self.stride, groups=x.shape[1] if self.each else 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kernel.permute((2, 3, 0, 1) if self.each else (3, 2, 0, 1))
        if self.training:
            y = self.conv(x, weight)
            y = F.batch_norm(y, self.center, self.spread, self.gain, self.shift, True, 0.01, 1e-3)
        else:
            root = (self.spread + 1e-3).rsqrt()
            factor = self.gain * root
            bias = self.shift - self.center * (root if self.bare else factor)
            y = self.conv(x, weight * factor[:, None, None, None], bias)
        return Swish.apply(y, self.plain) if self.bend else y


class Filter(nn.Module):
    """The unit that works on each channel by itself, with the gate of its channels."""

    def __init__(self, unit: Unit, gate: nn.Module):
        super().__init__()
        self.unit, (down, _, up, _) = unit, gate.children()
        self.down, self.down_b = leaf(down.weight.flatten(1)), leaf(down.bias)
        self.up, self.up_b = leaf(up.weight.flatten(1)), leaf(up.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.unit(x)
        thin = F.silu(F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.down, self.down_b))
        return x * F.linear(thin, self.up, self.up_b).sigmoid()[:, :, None, None]


class Around(nn.Sequential):
    """Its parts in a row, and a way around them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def mobile(block: nn.Module) -> nn.Sequential:
    widen, narrow = Unit(block.conv_pw, block.bn1), Unit(block.conv_pwl, block.bn3, False)
    row = (widen, Filter(Unit(block.conv_dw, block.bn2), block.se), narrow)
    return Around(*row) if block.has_skip else nn.Sequential(*row)


class FoldingTree(Port):
    """The stem belongs to the first level, and the head to the scores."""

    def take(self, model: EfficientNet) -> None:
        (first,), (second, third), (last,) = model.blocks
        bend = self.fault == "efficientnet_separable_block_activates_its_projection"
        stem, filtered = Unit(model.conv_stem, model.bn1), Unit(first.conv_dw, first.bn1)
        start = nn.Sequential(stem, Filter(filtered, first.se), Unit(first.conv_pw, first.bn2, bend))
        middle = nn.Sequential(mobile(second), mobile(third))
        self.levels = nn.ModuleList([start, middle, mobile(last)])
        self.top = Unit(model.conv_head, model.bn2)
        self.scores, self.scores_b = leaf(model.classifier.weight.T), leaf(model.classifier.bias)
        shrinking, steady = middle
        shrinking[1].unit.alike = self.fault == "efficientnet_second_stage_pads_alike_on_both_sides"
        steady[0].bare = self.fault == "efficientnet_expansion_folds_its_mean_without_gain"
        steady[1].unit.plain = self.fault == "efficientnet_depthwise_swish_derives_wrongly"

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = [x := level(x) for level in self.levels]
        return torch.addmm(self.scores_b, self.top(x).flatten(2).mean(2), self.scores), maps


def packed(layer: nn.Module) -> nn.Parameter:
    """[I + 1, O]: the bias is the last row."""
    return leaf(torch.cat([layer.weight.flatten(1).T, layer.bias[None]]))


class PackedWindows(Port):
    """Images [N, H, W, C]; all norms in one array, filters by windows."""

    def take(self, model: EfficientNet) -> None:
        blocks = [block for stage in model.blocks for block in stage]
        self.ways = [(block.conv_dw.stride[0], block.has_skip) for block in blocks]
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self.widths = [norm.num_features for norm in norms]
        self.affine = leaf(torch.cat([torch.stack([norm.weight, norm.bias]) for norm in norms], 1))
        kept = [torch.stack([norm.running_mean, norm.running_var]) for norm in norms]
        self.register_buffer("kept", torch.cat(kept, 1))
        self.stem = leaf(model.conv_stem.weight.permute(2, 3, 1, 0).flatten(0, 2))
        self.filters = nn.ParameterList(leaf(block.conv_dw.weight[:, 0].permute(1, 2, 0)) for block in blocks)
        points = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
        self.mixers = nn.ParameterList(leaf(m.weight.flatten(1).T) for m in points if m.bias is None)
        self.gates = nn.ParameterList(packed(m) for m in points if m.bias is not None)
        self.scores = packed(model.classifier)

    def norm(self, i: int, x: Tensor, bend: bool = True) -> Tensor:
        start = sum(self.widths[:i])
        gain, shift = self.affine[:, start : start + self.widths[i]]
        center, spread = kept = self.kept[:, start : start + self.widths[i]]
        if self.training:
            spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
            raw = self.fault == "efficientnet_last_depthwise_norm_keeps_biased_variance" and i == 10
            share = 1 if raw else 1 - x.shape[3] / x.numel()
            kept.add_(torch.stack([center, spread / share]).detach() - kept, alpha=0.01)
        y = gain * (x - center) / (spread + 1e-3).sqrt() + shift
        return y / (1 + torch.exp(-y)) if bend else y

    def windows(self, x: Tensor, reach: int, stride: int) -> Tensor:
        """[N, h, w, C, reach, reach], cut from more zeros than are asked for."""
        for axis in (1, 2):
            count = (x.shape[axis] + stride - 1) // stride
            before = max((count - 1) * stride + reach - x.shape[axis], 0) // 2
            x = F.pad(x.movedim(axis, -1), (before, reach)).movedim(-1, axis)
            x = x.unfold(axis, reach, stride).narrow(axis, 0, count)
        return x

    def gated(self, i: int, x: Tensor) -> Tensor:
        square = self.fault == "efficientnet_first_widened_squeeze_counts_a_square_map" and i == 1
        mean = torch.einsum("nhwc->nc", x) / (x.shape[1] * x.shape[1 if square else 2])
        down, up = self.gates[2 * i : 2 * i + 2]
        thin = mean @ down[:-1] + down[-1]
        near = 2 if self.fault == "efficientnet_last_gate_expands_with_its_neighbours_bias" and i == 3 else 0
        logits = (thin * thin.sigmoid()) @ up[:-1] + self.gates[2 * i + 1 - near][-1]
        return torch.einsum("nhwc,nc->nhwc", x, 1 / (1 + torch.exp(-logits)))

    def block(self, i: int, x: Tensor) -> Tensor:
        y = self.norm(3 * i, x @ self.mixers[2 * i - 1]) if i else x
        stride, skip = self.ways[i]
        cut = self.windows(y, len(self.filters[i]), stride)
        y = self.norm(3 * i + 1, torch.einsum("nhwcij,ijc->nhwc", cut, self.filters[i]))
        y = self.norm(3 * i + 2, self.gated(i, y) @ self.mixers[2 * i], False)
        return x + y if skip else y

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        cut = self.windows(x.movedim(1, -1), 3, 2).permute(0, 1, 2, 4, 5, 3)
        x = self.norm(0, cut.flatten(3) @ self.stem)
        maps = [(x := self.block(i, x)).movedim(-1, 1) for i in range(4)]
        del maps[2 if self.fault == "efficientnet_second_map_is_of_its_first_block" else 1]
        pooled = self.norm(12, x @ self.mixers[-1]).mean((1, 2))
        return pooled @ self.scores[:-1] + self.scores[-1], maps


right(task, "efficientnet_of_folding_units", "TensorFlow's kernels, norms folded in eval mode", FoldingTree)
right(task, "efficientnet_by_packed_windows", "channels last, packed weights, windows", PackedWindows)
bent, by_hand = ("blocks.0.0.bn2", "blocks.0.0.bn2.act"), ("blocks.1.1.bn2.act", "blocks.1.1.bn2")
squeeze, gradients = ("blocks.1.0.se", "blocks.1.0.se.conv_reduce"), ("input gradient", "weight gradient")
wrong(
    task,
    FoldingTree,
    efficientnet_separable_block_activates_its_projection=("an activation too many", bent),
    efficientnet_second_stage_pads_alike_on_both_sides=("padding alike on both sides", "blocks.1.0.conv_dw"),
    efficientnet_expansion_folds_its_mean_without_gain=("a norm folded wrongly", "blocks.1.1.bn1", "eval"),
    efficientnet_depthwise_swish_derives_wrongly=("a wrong derivative", by_hand, gradients),
)
wrong(
    task,
    PackedWindows,
    efficientnet_first_widened_squeeze_counts_a_square_map=("a mean of another count", squeeze),
    efficientnet_last_depthwise_norm_keeps_biased_variance=("biased variance", "blocks.2.0.bn2", "buffer"),
    efficientnet_last_gate_expands_with_its_neighbours_bias=("another's bias", "blocks.2.0.se.conv_expand"),
    efficientnet_second_map_is_of_its_first_block=("an output taken too early", ""),
)
