"""Depthwise networks: inverted residuals, squeeze-excite, ConvNeXt."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, classifier, leaf, pair
from bench.tasks import _classes, _task


class Inverted(nn.Module):
    def __init__(self, inside: int, out: int, stride: int):
        super().__init__()
        self.expand = nn.Conv2d(inside, 2 * inside, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * inside)
        self.depthwise = nn.Conv2d(2 * inside, 2 * inside, 3, stride, 1, groups=2 * inside, bias=False)
        self.project = nn.Conv2d(2 * inside, out, 1)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norm(self.expand(x)))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if y.shape == x.shape else y


class PixelBlock(Port):
    def take(self, block: Inverted) -> None:
        self.stride, self.shift = block.stride, int(self.fault and block.stride == 2)
        self.widen = leaf(block.expand.weight.flatten(1).T)
        self.statistics = nn.BatchNorm1d(len(block.norm.weight)).to(block.norm.weight)
        self.statistics.load_state_dict(block.norm.state_dict())
        self.taps = leaf(block.depthwise.weight.flatten(1).T)
        self.narrow, self.offset = leaf(block.project.weight.flatten(1).T), block.project.bias

    def forward(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        y = self.statistics((x @ self.widen).flatten(0, 2)).unflatten(0, x.shape[:3]).clamp(0, 6)
        y = F.pad(y, (0, 0, 1, 2, 1, 2))[:, self.shift :, self.shift :]
        corners = [(row, column) for row in range(3) for column in range(3)]
        moved = [y[:, r : r + height : self.stride, c : c + width : self.stride] for r, c in corners]
        y = sum(part * tap for part, tap in zip(moved, self.taps, strict=True)).clamp(0, 6)
        y = y @ self.narrow + self.offset
        return x + y if self.stride == 1 else y


class PixelMobileNet(Port):
    """Channels last, shifts for convolutions; the fault: TensorFlow's "same" padding of a strided one."""

    def take(self, model: nn.Sequential) -> None:
        self.first, self.head = model[0], model[5]
        self.rest = nn.ModuleList(PixelBlock(block, self.fault) for block in model[1:3])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        for block in self.rest:
            x = block(x)
        return self.head(x.flatten(1, 2).mean(1))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class GatedTrunk(Port):
    """The gate as a product of matrices in the trunk; the fault: the pooled input is detached."""

    def take(self, model: nn.Sequential) -> None:
        self.trunk, self.tail = model[:4], nn.ModuleDict({"project": model[5:9], "classify": model[9]})
        convs = model[4].reduce, model[4].expand
        both = [torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1) for conv in convs]
        self.squeeze, self.excite = leaf(both[0]), leaf(both[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        gate = (x.detach() if self.fault else x).flatten(2).mean(2)
        for weight, act in ((self.squeeze, F.silu), (self.excite, torch.sigmoid)):
            gate = act(F.pad(gate, (0, 1), value=1.0) @ weight.T)
        x = self.tail["project"](torch.einsum("nchw,nc->nchw", x, gate))
        return self.tail["classify"](x)


class NextBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))).permute(0, 3, 1, 2)


class PlaneBlock(nn.Module):
    def __init__(self, block: NextBlock, eps: float):
        super().__init__()
        self.eps, self.token = eps, block.dwconv
        wide, narrow = block.pwconv1, block.pwconv2
        self.gain, self.shift = leaf(block.norm.weight[:, None, None]), leaf(block.norm.bias[:, None, None])
        self.up, self.down = leaf(wide.weight[..., None, None]), leaf(narrow.weight[..., None, None])
        self.up_bias, self.down_bias, self.scale = wide.bias, narrow.bias, leaf(block.gamma[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        y = self.token(x)
        y = y - y.mean(1, keepdim=True)
        y = y / torch.sqrt(y.square().mean(1, keepdim=True) + self.eps) * self.gain + self.shift
        y = F.conv2d(y, self.up, self.up_bias)
        return x + self.scale * F.conv2d(F.gelu(y), self.down, self.down_bias)


def plane_convnext(model: nn.Sequential, fault: bool) -> nn.Sequential:
    """Channels second, not last, and norms by hand; the fault: the usual epsilon in the second block."""
    patch, first, second, pool, flatten, head = model
    body = nn.Sequential(PlaneBlock(first, 1e-6), PlaneBlock(second, 1e-5 if fault else 1e-6))
    return nn.Sequential(nn.Sequential(patch, body), nn.Sequential(pool, flatten, head))


def _mobilenet() -> nn.Sequential:
    return classifier(nn.Conv2d(3, 12, 3, padding=1), Inverted(12, 12, 1), Inverted(12, 20, 2), width=20)


def _efficientnet() -> nn.Sequential:
    convs = nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.SiLU()
    return classifier(*convs, SqueezeExcite(16), nn.Conv2d(16, 24, 1), nn.SiLU(), width=24)


def _convnext() -> nn.Sequential:
    return classifier(nn.Conv2d(3, 16, 2, 2), NextBlock(16), NextBlock(16))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 3, 12, 12), _classes(10, 5)


mobile = _task("second_mobilenet", _mobilenet, _batch)
pair(mobile, PixelMobileNet, "convolution_as_shifted_products", "same_padding_of_tensorflow", "2.depthwise")
squeeze = _task("second_efficientnet", _efficientnet, _batch)
pair(squeeze, GatedTrunk, "biases_inside_matrices", "gate_does_not_teach_its_input", "4", "input gradient")
convnext = _task("second_convnext", _convnext, _batch)
pair(convnext, plane_convnext, "linear_becomes_pointwise", "usual_epsilon_in_one_norm", "2.norm")
