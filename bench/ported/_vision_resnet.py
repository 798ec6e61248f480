"""A small ResNet as torchvision spells it, as Flax does, and as functions of a flat dict of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied
from bench.tasks import _classes, _task


class Basic(nn.Module):
    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or before != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + short)


class ResNet(nn.Module):
    """[N, 3, 16, 16] -> [N, 6]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(Basic(16, 16, 1))
        self.layer2 = nn.Sequential(Basic(16, 24, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


resnet = _task("ported_resnet", ResNet, lambda: (torch.randn(8, 3, 16, 16), _classes(8, 6)))
NORMS = tuple(name for name, m in ResNet().named_modules() if isinstance(m, nn.BatchNorm2d))


class Kernel(nn.Module):
    """A conv over [N, H, W, C] with a kernel [H, W, in, out]."""

    def __init__(self, conv: nn.Conv2d, same: bool):
        super().__init__()
        self.kernel = copied(conv.weight.permute(2, 3, 1, 0))
        self.strides, self.same = conv.stride[0], same
        self.around = conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        before = after = self.around
        if self.same:
            total = max(self.kernel.shape[0] - self.strides, 0)
            before, after = total // 2, total - total // 2
        x = F.pad(x, (0, 0, before, after, before, after)).permute(0, 3, 1, 2)
        return F.conv2d(x, self.kernel.permute(3, 2, 0, 1), stride=self.strides).permute(0, 2, 3, 1)


class Statistics(nn.Module):
    """BatchNorm over the last axis, whose momentum is the share of the old statistics that stays."""

    def __init__(self, norm: nn.BatchNorm2d, keep: float, unbiased: bool):
        super().__init__()
        self.scale, self.bias = copied(norm.weight), copied(norm.bias)
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("var", norm.running_var.clone())
        self.keep, self.unbiased = keep, unbiased

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            rows = x.flatten(0, -2)
            mean, var = rows.mean(0), rows.var(0, unbiased=False)
            n = rows.shape[0]
            seen = var * n / (n - 1) if self.unbiased else var
            with torch.no_grad():
                self.mean.lerp_(mean, 1 - self.keep)
                self.var.lerp_(seen, 1 - self.keep)
        return (x - mean) * (var + 1e-5).rsqrt() * self.scale + self.bias


class Unit(nn.Module):
    def __init__(self, block: Basic, make, same: bool):
        super().__init__()
        self.Conv_0, self.Conv_1 = Kernel(block.conv1, same), Kernel(block.conv2, same)
        self.BatchNorm_0, self.BatchNorm_1 = make(block.bn1), make(block.bn2)
        if block.downsample is not None:
            self.conv_proj, self.norm_proj = Kernel(block.downsample[0], same), make(block.downsample[1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.BatchNorm_1(self.Conv_1(self.BatchNorm_0(self.Conv_0(x)).relu()))
        if hasattr(self, "conv_proj"):
            x = self.norm_proj(self.conv_proj(x))
        return (x + y).relu()


class Flax(nn.Module):
    def __init__(
        self,
        model: ResNet,
        keep: float = 0.9,
        unbiased: bool = True,
        same: bool = False,
    ):
        super().__init__()

        def make(norm: nn.BatchNorm2d) -> Statistics:
            return Statistics(norm, keep, unbiased)

        self.conv_init, self.bn_init = Kernel(model.conv1, False), make(model.bn1)
        self.ResNetBlock_0 = Unit(model.layer1[0], make, same)
        self.ResNetBlock_1 = Unit(model.layer2[0], make, same)
        self.Dense_0 = nn.Module()
        self.Dense_0.kernel, self.Dense_0.bias = copied(model.fc.weight.T), copied(model.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn_init(self.conv_init(x.permute(0, 2, 3, 1))).relu()
        x = self.ResNetBlock_1(self.ResNetBlock_0(x)).mean((1, 2))
        return x @ self.Dense_0.kernel + self.Dense_0.bias


class Flat(nn.Module):
    """Everything is a function of weights whose names have underscores for dots."""

    def __init__(self, model: ResNet):
        super().__init__()
        for name, weight in model.named_parameters():
            self.register_parameter("w_" + name.replace(".", "_"), copied(weight))
        for name, buffer in model.named_buffers():
            if "tracked" not in name:
                self.register_buffer("s_" + name.replace(".", "_"), buffer.clone())

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = getattr(self, f"w_{name}_weight")
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(self, x: Tensor, name: str) -> Tensor:
        saved = getattr(self, f"s_{name}_running_mean"), getattr(self, f"s_{name}_running_var")
        affine = getattr(self, f"w_{name}_weight"), getattr(self, f"w_{name}_bias")
        return F.batch_norm(x, *saved, *affine, training=self.training)

    def block(self, x: Tensor, name: str, stride: int) -> Tensor:
        y = F.relu(self.norm(self.conv(x, f"{name}_conv1", stride), f"{name}_bn1"))
        y = self.norm(self.conv(y, f"{name}_conv2"), f"{name}_bn2")
        if hasattr(self, f"w_{name}_downsample_0_weight"):
            x = self.norm(self.conv(x, f"{name}_downsample_0", stride), f"{name}_downsample_1")
        return F.relu(x + y)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x, "conv1"), "bn1"))
        x = self.block(self.block(x, "layer1_0", 1), "layer2_0", 2)
        return F.linear(x.mean((2, 3)), self.w_fc_weight, self.w_fc_bias)
