"""A one-stage detector without anchors: a residual trunk, a feature pyramid, and towers that levels share."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, PLANES, WIDTH, GROUPS, IMAGES, HIGH, WIDE = 3, (8, 8, 12), 8, 2, 3, 48, 56
STRIDES, SIZES = (4, 8, 16, 32, 64), ((12, 14), (6, 7), (3, 4), (2, 2), (1, 1))


def grid(size: tuple[int, int], stride: int, like: Tensor) -> Tensor:
    """The middles (x, y) of the cells of a level, row by row."""
    y, x = ((torch.arange(n, dtype=like.dtype, device=like.device) + 0.5) * stride for n in size)
    return torch.cartesian_prod(y, x).flip(1)


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Bottleneck(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1, norm_layer: type = nn.BatchNorm2d):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), norm_layer(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), norm_layer(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 2 * planes, 1, bias=False), norm_layer(2 * planes)
        self.relu, self.downsample = nn.ReLU(), None
        if stride > 1 or inplanes != 2 * planes:
            conv = nn.Conv2d(inplanes, 2 * planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, norm_layer(2 * planes))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        (a, b, c), fixed = PLANES, FrozenBatchNorm2d
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), fixed(8)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, a, 1, fixed), Bottleneck(2 * a, a, 1, fixed))
        self.layer2 = nn.Sequential(Bottleneck(2 * a, b, 2), Bottleneck(2 * b, b))
        self.layer3 = nn.Sequential(Bottleneck(2 * b, c, 2), Bottleneck(2 * c, c))

    def forward(self, x: Tensor) -> list[Tensor]:
        first = self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        second = self.layer2(first)
        return [first, second, self.layer3(second)]


class LastLevelP6P7(nn.Module):
    def __init__(self):
        super().__init__()
        self.p6, self.p7 = (nn.Conv2d(WIDTH, WIDTH, 3, 2, 1) for _ in range(2))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [*maps, self.p6(maps[-1])]
        return [*maps, self.p7(F.relu(maps[-1]))]


class FeaturePyramidNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner_blocks = nn.ModuleList(nn.Conv2d(2 * n, WIDTH, 1) for n in PLANES)
        self.layer_blocks = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1) for _ in PLANES)
        self.extra_blocks = LastLevelP6P7()

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        last_inner = self.inner_blocks[-1](x[-1])
        results = [self.layer_blocks[-1](last_inner)]
        for i in range(len(x) - 2, -1, -1):
            lateral = self.inner_blocks[i](x[i])
            last_inner = lateral + F.interpolate(last_inner, size=lateral.shape[-2:], mode="nearest")
            results.insert(0, self.layer_blocks[i](last_inner))
        return self.extra_blocks(results)


def tower() -> nn.Sequential:
    made = ((nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.GroupNorm(GROUPS, WIDTH), nn.ReLU()) for _ in range(2))
    return nn.Sequential(*(layer for three in made for layer in three))


def listed(maps: list[Tensor]) -> Tensor:
    return torch.cat([x.permute(0, 2, 3, 1).flatten(1, 2) for x in maps], 1)


class FCOSClassificationHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.cls_logits = tower(), nn.Conv2d(WIDTH, CLASSES, 3, 1, 1)

    def forward(self, x: list[Tensor]) -> Tensor:
        return listed([self.cls_logits(self.conv(level)) for level in x])


class FCOSRegressionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = tower()
        self.bbox_reg, self.bbox_ctrness = (nn.Conv2d(WIDTH, n, 3, 1, 1) for n in (4, 1))
        self.scales = nn.Parameter(0.7 + 0.6 * torch.rand(len(STRIDES)))

    def forward(self, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = [self.conv(level) for level in x]
        sides = [(scale * self.bbox_reg(level)).exp() for scale, level in zip(self.scales, x, strict=True)]
        return listed(sides), listed([self.bbox_ctrness(level) for level in x])


class AnchorGenerator(nn.Module):
    def forward(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        points = [grid(x.shape[-2:], stride, x) for x, stride in zip(maps, STRIDES, strict=True)]
        strides = [torch.full_like(p[:, :1], s) for p, s in zip(points, STRIDES, strict=True)]
        return torch.cat(points), torch.cat(strides)


class BoxLinearCoder(nn.Module):
    def forward(self, sides: Tensor, points: Tensor, strides: Tensor, size: tuple[int, int]) -> Tensor:
        low, high = (sides * strides).chunk(2, 2)
        boxes = torch.cat([points - low, points + high], 2)
        if not self.training:  # no box leaves the image
            boxes = boxes.clamp(min=0).minimum(boxes.new_tensor([size[1], size[0]] * 2))
        return boxes


def settle(module: nn.Module) -> None:
    """Values as after some training: no bias of zero, no norm that does nothing."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif hasattr(module, "weight"):
        nn.init.uniform_(module.weight, 0.6, 1.3)
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.2)
    if hasattr(module, "running_var"):
        nn.init.normal_(module.running_mean, std=0.3)
        nn.init.uniform_(module.running_var, 0.5, 2.0)


class FCOS(nn.Module):
    """Images [N, 3, H, W] -> logits [N, L, K], boxes [N, L, 4] and centredness [N, L, 1]."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(OrderedDict(body=ResNet(), fpn=FeaturePyramidNetwork()))
        sides = {"classification_head": FCOSClassificationHead(), "regression_head": FCOSRegressionHead()}
        self.head = nn.ModuleDict(sides)
        self.anchor_generator, self.box_coder = AnchorGenerator(), BoxLinearCoder()
        self.apply(settle)
        nn.init.normal_(self.head.classification_head.cls_logits.weight, std=0.06)
        nn.init.normal_(self.head.regression_head.bbox_reg.weight, std=0.06)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.backbone(images)
        sides, centred = self.head.regression_head(maps)
        boxes = self.box_coder(sides, *self.anchor_generator(maps), images.shape[-2:])
        return {"cls_logits": self.head.classification_head(maps), "boxes": boxes, "bbox_ctrness": centred}


def scenes() -> tuple[Tensor, Tensor]:
    """Images with one coloured box; for each point its class or -1, the box and how central it is."""
    size = 16 + 28 * torch.rand(IMAGES, 1, 2)
    low = torch.rand(IMAGES, 1, 2) * (torch.tensor([WIDE, HIGH]) - size)
    kinds, box = torch.randint(CLASSES, (IMAGES, 1)), torch.cat([low, low + size], 2)
    pixels, points = (
        torch.cat([x - low, low + size - x], 2)
        for x in (grid((HIGH, WIDE), 1, low), torch.cat([*map(grid, SIZES, STRIDES, [low] * 5)]))
    )
    shapes = (pixels.amin(2) > 0).to(low).unflatten(1, (1, HIGH, WIDE))
    colours = F.one_hot(kinds[:, 0], 3)[..., None, None]
    images = 0.4 * torch.randn(IMAGES, 3, HIGH, WIDE) + 2 * shapes * colours
    found, pairs = points.amin(2) > 0, points.clamp(min=0.001).unflatten(2, (2, 2))
    central = (pairs.amin(2) / pairs.amax(2)).prod(2).sqrt()
    rows = [kinds.where(found, -1)[..., None].to(box), box.expand(-1, len(found[0]), -1), central[..., None]]
    return images, torch.cat(rows, 2)


def detection(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean of a focal loss, and for points in a box of errors in its corners and in centredness."""
    logits, target = output["cls_logits"], target.to(output["boxes"])
    found = target[..., 0] >= 0
    true = F.one_hot(target[..., 0].long() + 1, CLASSES + 1)[..., 1:].to(logits)
    weight = (0.75 - 0.5 * true) * (true - logits.sigmoid()).square()
    focal = (weight * F.binary_cross_entropy_with_logits(logits, true, reduction="none")).sum()
    apart = F.l1_loss(output["boxes"][found], target[..., 1:5][found]) / STRIDES[2]
    centred = F.binary_cross_entropy_with_logits(output["bbox_ctrness"][found][:, 0], target[found][:, 5])
    return (focal / found.sum() + apart + centred) / 3
