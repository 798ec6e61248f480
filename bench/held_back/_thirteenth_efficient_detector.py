"""A small EfficientDet: inverted residuals, two cells of weighted fusion over three levels, shared heads."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES, STEPS, ANCHORS, CLASSES, WIDTH = ((10, 8), (5, 4), (3, 2)), (4, 8, 16), 3, 3, 16


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Edges as TensorFlow has them: the odd one comes last."""
    high, wide = (max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
    return F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2), value=value)


class Conv2dSame(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, self.kernel_size[0], self.stride[0])
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


class MaxPool2dSame(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_same(x, self.kernel_size, self.stride, -math.inf))


def normed(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, reduced: int):
        super().__init__()
        self.conv_reduce, self.act1 = nn.Conv2d(width, reduced, 1), nn.SiLU()
        self.conv_expand, self.gate = nn.Conv2d(reduced, width, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.act1(self.conv_reduce(x.mean((2, 3), keepdim=True)))
        return x * self.gate(self.conv_expand(squeezed))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int):
        super().__init__()
        inner, self.has_residual = 3 * inputs, inputs == outputs and stride == 1
        self.conv_pw, self.bn1, self.act1 = Conv2dSame(inputs, inner, 1, bias=False), normed(inner), nn.SiLU()
        self.conv_dw = Conv2dSame(inner, inner, kernel, stride, groups=inner, bias=False)
        self.bn2, self.act2, self.se = normed(inner), nn.SiLU(), SqueezeExcite(inner, inputs // 2)
        self.conv_pwl, self.bn3 = Conv2dSame(inner, outputs, 1, bias=False), normed(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(self.conv_pw(x)))
        y = self.se(self.act2(self.bn2(self.conv_dw(y))))
        y = self.bn3(self.conv_pwl(y))
        return y + x if self.has_residual else y


class EfficientNetFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1, self.act1 = Conv2dSame(3, 8, 3, 2, bias=False), normed(8), nn.SiLU()
        pair = nn.Sequential(InvertedResidual(8, 12, 3, 2), InvertedResidual(12, 12, 3, 1))
        self.blocks = nn.Sequential(pair, nn.Sequential(InvertedResidual(12, 20, 5, 2)))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.blocks[0](self.act1(self.bn1(self.conv_stem(x))))
        return [fine, self.blocks[1](fine)]


class SeparableConv2d(nn.Sequential):
    def __init__(self, outputs: int, bias: bool = True, norm: bool = False):
        super().__init__()
        self.conv_dw = Conv2dSame(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)
        self.conv_pw = Conv2dSame(WIDTH, outputs, 1, bias=bias)
        if norm:
            self.bn = normed(outputs)


class ResampleFeatureMap(nn.Sequential):
    def __init__(self, inputs: int, given: tuple[int, int], wanted: tuple[int, int]):
        super().__init__()
        if inputs != WIDTH:
            self.conv = nn.Sequential(OrderedDict(conv=Conv2dSame(inputs, WIDTH, 1), bn=normed(WIDTH)))
        if given > wanted:
            self.downsample = MaxPool2dSame(3, 2)
        elif given < wanted:
            self.upsample = nn.Upsample(wanted, mode="nearest")


class FpnCombine(nn.Module):
    """Fast normalised fusion of the features at ``offsets``."""

    def __init__(self, info: list[tuple], offsets: tuple[int, ...], size: tuple[int, int]):
        super().__init__()
        self.resample = nn.ModuleDict({str(o): ResampleFeatureMap(*info[o], size) for o in offsets})
        self.edge_weights = nn.Parameter(torch.empty(len(offsets)).uniform_(0.4, 1.6))

    def forward(self, x: list[Tensor]) -> Tensor:
        edges = F.relu(self.edge_weights)
        total = edges.sum() + 0.0001
        nodes = [resample(x[int(offset)]) for offset, resample in self.resample.items()]
        return torch.stack([node * edge / total for node, edge in zip(nodes, edges, strict=True)], -1).sum(-1)


class BiFpnLayer(nn.Module):
    """The middle level on the way down, then all three on the way up."""

    def __init__(self, *widths: int):
        super().__init__()
        info, self.fnode = list(zip(widths, SIZES, strict=True)), nn.ModuleList()
        for level, offsets in ((1, (1, 2)), (0, (0, 3)), (1, (1, 3, 4)), (2, (2, 5))):
            after = nn.Sequential(OrderedDict(act=nn.SiLU(), conv=SeparableConv2d(WIDTH, False, True)))
            combine = FpnCombine(info, offsets, SIZES[level])
            self.fnode.append(nn.Sequential(OrderedDict(combine=combine, after_combine=after)))
            info.append((WIDTH, SIZES[level]))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        for fnode in self.fnode:
            x = [*x, fnode(x)]
        return x[-3:]


class BiFpn(nn.Module):
    def __init__(self):
        super().__init__()
        self.resample = nn.ModuleDict({"2": ResampleFeatureMap(20, SIZES[1], SIZES[2])})
        self.cell = nn.Sequential(BiFpnLayer(12, 20, WIDTH), BiFpnLayer(WIDTH, WIDTH, WIDTH))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        return self.cell([*x, self.resample["2"](x[-1])])


class HeadNet(nn.Module):
    """Convolutions that all levels share; each level has norms of its own."""

    def __init__(self, outputs: int):
        super().__init__()
        self.conv_rep, self.act = nn.ModuleList(SeparableConv2d(WIDTH) for _ in range(2)), nn.SiLU()
        self.bn_rep = nn.ModuleList(nn.ModuleList(normed(WIDTH) for _ in SIZES) for _ in range(2))
        self.predict = SeparableConv2d(ANCHORS * outputs)

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        x = list(x)
        for level in range(len(x)):
            for conv, bn in zip(self.conv_rep, self.bn_rep, strict=True):
                x[level] = self.act(bn[level](conv(x[level])))
        return [self.predict(y) for y in x]


def varied(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        for values, low, high in ((module.weight, 0.6, 1.4), (module.bias, -0.4, 0.4)):
            nn.init.uniform_(values, low, high)
        nn.init.normal_(module.running_mean, std=0.3)
        nn.init.uniform_(module.running_var, 0.6, 1.4)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)


class EfficientDet(nn.Module):
    """Images [N, 3, 40, 32] -> maps of class scores and of boxes, each for three levels."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fpn = EfficientNetFeatures(), BiFpn()
        self.class_net, self.box_net = HeadNet(CLASSES), HeadNet(4)
        self.apply(varied)
        self.fpn.cell[1].fnode[2].combine.edge_weights.data[0] = -0.3

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        x = self.fpn(self.backbone(x))
        return self.class_net(x), self.box_net(x)


def images() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A bright object for each level, each with two anchors of its own; of the others, some are ignored."""
    x, places = 0.5 * torch.randn(2, 3, 40, 32), 0.3 * torch.randn(2, 318, 4)
    classes = -1 - (torch.rand(2, 318) < 0.1).long()
    for n in range(2):
        start = 0
        for (high, wide), step in zip(SIZES, STEPS, strict=True):
            i, j, label = (int(torch.randint(count, ())) for count in (high, wide, CLASSES))
            x[n, label, i * step : i * step + step, j * step : j * step + step] += 2
            at, start = start + ANCHORS * (i * wide + j), start + ANCHORS * high * wide
            classes[n, at : at + 2] = label
    return x, (classes, places)


def detection_loss(outputs: tuple[list[Tensor], list[Tensor]], target: tuple[Tensor, Tensor]) -> Tensor:
    """Focal loss of the classes, and a Huber loss of the boxes that hold an object."""
    scores, boxes = (torch.cat([y.permute(0, 2, 3, 1).flatten(1) for y in maps], 1) for maps in outputs)
    scores, boxes, (classes, places) = scores.unflatten(1, (-1, CLASSES)), boxes.unflatten(1, (-1, 4)), target
    held, counts = (classes >= 0)[..., None], (classes > -2)[..., None]
    truth = (F.one_hot(classes.clamp(min=0), CLASSES) * held).to(scores)
    missing = (truth - scores.sigmoid()).abs()
    entropy = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
    focal = (0.75 - 0.5 * truth) * missing**1.5 * entropy * counts
    away = F.huber_loss(boxes, places, reduction="none", delta=0.1) * held
    return 0.2 * (focal.sum() + 50 * away.sum() / 4) / (held.sum() + 1)
