"""Two ports of a MobileNetV3 from TensorFlow: a tree of convolution units, and channels last by functions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._ninth_mobile import LeanHardSwish, MobileNetV3, entropy, gratings, settled
from bench.held_back._sixth_ports import few

mobile = few("ninth_mobile", settled, gratings, entropy)
ACTS = {nn.ReLU: F.relu, nn.Hardswish: F.hardswish, nn.Identity: lambda x: x}


def edges(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """How far TensorFlow pads before and after an axis."""
    total = max(kernel - (size % stride or stride), 0)
    return total // 2, total - total // 2


class Unit(nn.Module):
    """Padding, a convolution, its norm and the activation; ``even`` pads all sides alike."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, even: bool = False):
        super().__init__()
        self.kernel, self.act, self.even = leaf(conv.weight), ACTS[type(norm.act)], even
        self.size, self.stride, self.groups = conv.kernel_size[0], conv.stride[0], conv.groups
        self.norm = nn.BatchNorm2d(norm.num_features, norm.eps, norm.momentum).to(conv.weight)
        self.norm.load_state_dict(norm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        high, wide = (edges(length, self.size, self.stride) for length in x.shape[2:])
        if self.even:
            high = wide = (self.size // 2, self.size // 2)
        x = F.conv2d(F.pad(x, (*wide, *high)), self.kernel, stride=self.stride, groups=self.groups)
        return self.act(self.norm(x))


def dense(layer: nn.Module) -> nn.Linear:
    """A layer of vectors for a linear one or for a convolution of single pixels."""
    copy = nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
    copy.weight, copy.bias = leaf(layer.weight.flatten(1)), leaf(layer.bias)
    return copy


class Excitation(nn.Module):
    """Factors [N, C, 1, 1] for the channels."""

    def __init__(self, se: nn.Module, at: tuple[int, int], fault: str):
        super().__init__()
        self.at, self.fault = at, fault
        self.down, self.up = dense(se.conv_reduce), dense(se.conv_expand)

    def forward(self, x: Tensor) -> Tensor:
        logits, slope = self.up(F.relu(self.down(x.flatten(2).mean(2)))), 1 / 6
        if self.fault == "gate_with_the_slope_of_old_keras" and self.at == (2, 1):
            slope = 0.2
        return (slope * logits + 0.5).clamp(0, 1)[:, :, None, None]


class Bottleneck(nn.Module):
    """Expansion where there is one, depthwise convolution, gates where there are any, projection."""

    def __init__(self, block: nn.Module, at: tuple[int, int], fault: str):
        super().__init__()
        self.at, self.fault, self.adds = at, fault, block.has_skip
        wide = hasattr(block, "conv_pwl")
        self.expand = Unit(block.conv_pw, block.bn1) if wide else None
        self.depthwise = Unit(block.conv_dw, block.bn2 if wide else block.bn1)
        self.project = Unit(block.conv_pwl, block.bn3) if wide else Unit(block.conv_pw, block.bn2)
        self.excitation = Excitation(block.se, at, fault) if hasattr(block.se, "gate") else None
        if self.fault == "usual_eps_after_one_depthwise" and at == (1, 2):
            self.depthwise.norm.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x if self.expand is None else self.expand(x))
        if self.excitation is not None:
            y = y * self.excitation(y)
        y = self.project(y)
        if self.fault == "rectified_projection_into_stage_one" and self.at == (1, 0):
            y = F.relu(y)
        return x + y if self.adds else y


class Bottlenecks(Port):
    def take(self, model: MobileNetV3) -> None:
        even = self.fault == "stem_padded_alike_on_all_sides"
        self.stem, blocks = Unit(model.conv_stem, model.bn1, even), nn.ModuleList()
        for s in range(3):
            blocks.extend(Bottleneck(block, (s, i), self.fault) for i, block in enumerate(model.blocks[s]))
        self.body, self.widen = blocks, Unit(model.blocks[3][0].conv, model.blocks[3][0].bn1)
        self.hidden, self.scores = dense(model.conv_head), dense(model.classifier)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = block(x)
        pixels = self.widen(x).flatten(2).mT
        if self.fault == "head_pools_after_its_activation":
            return self.scores(F.hardswish(self.hidden(pixels)).mean(1))
        return self.scores(F.hardswish(self.hidden(pixels.mean(1))))


def windows(x: Tensor, size: int, stride: int) -> Tensor:
    """[N, H, W, C] -> [N, H, W, C, size, size], as TensorFlow pads."""
    high, wide = (edges(length, size, stride) for length in x.shape[1:3])
    return F.pad(x, (0, 0, *wide, *high)).unfold(1, size, stride).unfold(2, size, stride)


class ChannelsLast(Port):
    """Kernels as TensorFlow stores them; in eval mode each norm is folded into the kernel before it."""

    def take(self, model: MobileNetV3) -> None:
        self.w, self.plan = nn.ParameterDict(), []
        self.eps, self.rate = model.bn1.eps, model.bn1.momentum
        layers = {"head": model.conv_head, "scores": model.classifier}
        self.hold("stem", model.conv_stem.weight.permute(2, 3, 1, 0), model.bn1)
        for i, b in enumerate(block for stage in model.blocks[:3] for block in stage):
            convs, norms = [b.conv_dw, b.conv_pw], [b.bn1, b.bn2]
            if hasattr(b, "conv_pwl"):
                self.hold(f"grow{i}", b.conv_pw.weight[..., 0, 0].T, b.bn1)
                convs, norms = [b.conv_dw, b.conv_pwl], [b.bn2, b.bn3]
            self.hold(f"deep{i}", convs[0].weight[:, 0].permute(1, 2, 0), norms[0])
            self.hold(f"shrink{i}", convs[1].weight[..., 0, 0].T, norms[1])
            if hasattr(b.se, "gate"):
                layers |= {f"squeeze{i}": b.se.conv_reduce, f"excite{i}": b.se.conv_expand}
            self.plan.append((b.conv_dw.stride[0], isinstance(b.bn1.act, nn.Hardswish), b.has_skip))
        self.hold("widen", model.blocks[3][0].conv.weight[..., 0, 0].T, model.blocks[3][0].bn1)
        for name, layer in layers.items():
            self.w[name] = leaf(torch.cat([layer.weight.flatten(1).T, layer.bias[None]]))

    def hold(self, name: str, kernel: Tensor, norm: nn.BatchNorm2d) -> None:
        self.w[name], self.w[name + "_norm"] = leaf(kernel), leaf(torch.stack([norm.weight, norm.bias]))
        self.register_buffer("kept_" + name, torch.stack([norm.running_mean, norm.running_var]))

    def normed(self, name: str, x: Tensor, rule: str = "nhwc,co->nhwo") -> Tensor:
        """``x`` times the kernel of that name, then the norm."""
        kernel, (gain, shift), kept = self.w[name], self.w[name + "_norm"], getattr(self, "kept_" + name)
        if self.fault == "depthwise_kernel_lies_on_its_side" and name == "deep7":
            kernel = kernel.transpose(0, 1)
        if not self.training:
            scale = gain * (kept[1] + self.eps).rsqrt()
            less = kept[0] * scale
            if self.fault == "fold_of_an_unscaled_mean" and name == "deep1":
                less = kept[0]
            return torch.einsum(rule, x, kernel * scale) + (shift - less)
        y = torch.einsum(rule, x, kernel)
        spread, mean = torch.var_mean(y, (0, 1, 2), correction=0)
        with torch.no_grad():
            kept.lerp_(torch.stack([mean, y.var((0, 1, 2))]), self.rate)
        return (y - mean) * (gain * (spread + self.eps).rsqrt()) + shift

    def act(self, name: str, x: Tensor) -> Tensor:
        bend = 1 / 6 if self.fault == "one_hard_swish_bends_by_half" and name == "grow5" else 1 / 3
        return LeanHardSwish.apply(x, bend)

    def affine(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name][:-1] + self.w[name][-1]

    def forward(self, images: Tensor) -> Tensor:
        x = windows(images.permute(0, 2, 3, 1), 3, 2)
        x = self.act("stem", self.normed("stem", x, "nhwcij,ijco->nhwo"))
        for i, (stride, hard, adds) in enumerate(self.plan):
            grow, deep, y = f"grow{i}", f"deep{i}", x
            if grow in self.w:
                y = self.normed(grow, y)
                y = self.act(grow, y) if hard else y.relu()
            y = self.normed(deep, windows(y, len(self.w[deep]), stride), "nhwcij,ijc->nhwc")
            y = self.act(deep, y) if hard else y.relu()
            if f"excite{i}" in self.w:
                gates = self.affine(f"excite{i}", self.affine(f"squeeze{i}", y.mean((1, 2))).relu())
                y = y * (gates / 6 + 0.5).clamp(0, 1)[:, None, None]
            y = self.normed(f"shrink{i}", y)
            x = x + y if adds else y
        x = self.act("widen", self.normed("widen", x)).mean((1, 2))
        return self.affine("scores", self.act("head", self.affine("head", x)))


# torch's batch norm gives wrong gradients for one sample where its result is read as tokens, on a CPU
@case(("round_off", "bug"), "a tree of padded convolution units", mobile)
def mobile_net_of_convolution_units(model: MobileNetV3) -> nn.Module:
    return Bottlenecks(model)


right(mobile, "mobile_net_channels_last", "channels last, norms folded in eval mode", ChannelsLast)
wrong(
    mobile,
    Bottlenecks,
    stem_padded_alike_on_all_sides=("even padding at a stride", "conv_stem"),
    rectified_projection_into_stage_one=("activation too many", ("blocks.1.0.bn3", "blocks.1.0.bn3.act")),
    usual_eps_after_one_depthwise=("another eps", "blocks.1.2.bn2"),
    gate_with_the_slope_of_old_keras=("another hard sigmoid", ("blocks.2.1.se.gate", "blocks.2.1.se")),
    head_pools_after_its_activation=("pooling and activation exchanged", ("global_pool", "act2")),
)
bent = ("blocks.2.0.bn1.act", "blocks.2.0.bn1")
wrong(
    mobile,
    ChannelsLast,
    fold_of_an_unscaled_mean=("norm folded wrongly", "blocks.0.1.bn1", "eval"),
    depthwise_kernel_lies_on_its_side=("height and width exchanged", "blocks.2.2.conv_dw"),
    one_hard_swish_bends_by_half=("a derivative by hand", bent, ("input gradient", "weight gradient")),
)
