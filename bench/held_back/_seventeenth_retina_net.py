"""A small RetinaNet: bottlenecks with frozen norms, a feature pyramid, heads that all its levels share."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE, WIDTH, CLASSES, RATIOS, IMAGES = (52, 44), 16, 3, (0.5, 1.0, 2.0), 2
SIZES = tuple((size, int(size * 2**0.5)) for size in (7, 12, 18, 28, 40))


class FrozenBatchNorm2d(nn.Module):
    """What a trained batch norm does in eval mode; none of its values is learned."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width).uniform_(0.6, 1.3))
        self.register_buffer("bias", 0.3 * torch.randn(width))
        self.register_buffer("running_mean", 0.3 * torch.randn(width))
        self.register_buffer("running_var", torch.empty(width).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int = 1):
        super().__init__()
        outputs = 4 * planes
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 1, bias=False), FrozenBatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = FrozenBatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, outputs, 1, bias=False), FrozenBatchNorm2d(outputs)
        self.relu, self.downsample = nn.ReLU(), None
        if stride > 1 or inputs != outputs:
            around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(around, FrozenBatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class IntermediateLayerGetter(nn.ModuleDict):
    """The layers of a ResNet up to the last wanted one; it gives what the wanted ones make."""

    def __init__(self):
        super().__init__()
        self["conv1"], self["bn1"] = nn.Conv2d(3, 8, 7, 2, 3, bias=False), FrozenBatchNorm2d(8)
        self["relu"], self["maxpool"] = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self["layer1"] = nn.Sequential(Bottleneck(8, 4))
        self["layer2"] = nn.Sequential(Bottleneck(16, 6, 2), Bottleneck(24, 6))
        self["layer3"] = nn.Sequential(Bottleneck(24, 8, 2))
        self.return_layers = {"layer1": "0", "layer2": "1", "layer3": "2"}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = OrderedDict()
        for name, layer in self.items():
            x = layer(x)
            if name in self.return_layers:
                maps[self.return_layers[name]] = x
        return maps


class LastLevelP6P7(nn.Module):
    def __init__(self):
        super().__init__()
        self.p6, self.p7 = (nn.Conv2d(WIDTH, WIDTH, 3, 2, 1) for _ in range(2))

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        p6 = self.p6(maps["2"])
        return OrderedDict(maps, p6=p6, p7=self.p7(F.relu(p6)))


class FeaturePyramidNetwork(nn.Module):
    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.inner_blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, WIDTH, 1)) for width in widths)
        layers = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in widths)
        self.layer_blocks = nn.ModuleList(nn.Sequential(layer) for layer in layers)
        self.extra_blocks = LastLevelP6P7()

    def forward(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        names, x = list(maps), list(maps.values())
        inner = self.inner_blocks[-1](x[-1])
        results = [self.layer_blocks[-1](inner)]
        for i in reversed(range(len(x) - 1)):
            lateral = self.inner_blocks[i](x[i])
            inner = lateral + F.interpolate(inner, size=lateral.shape[-2:], mode="nearest")
            results.insert(0, self.layer_blocks[i](inner))
        return self.extra_blocks(OrderedDict(zip(names, results, strict=True)))


class RetinaNetSide(nn.Module):
    """Two convolutions and the last one, named ``last``; rows [N, H W A, columns] of all maps."""

    def __init__(self, last: str, columns: int):
        super().__init__()
        units = (nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.conv, self.last, self.columns = nn.Sequential(*units), last, columns
        self.add_module(last, nn.Conv2d(WIDTH, len(RATIOS) * len(SIZES[0]) * columns, 3, padding=1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        rows = [getattr(self, self.last)(self.conv(x)).unflatten(1, (-1, self.columns)) for x in maps]
        return torch.cat([x.permute(0, 3, 4, 1, 2).flatten(1, 3) for x in rows], 1)


class RetinaNetHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.classification_head = RetinaNetSide("cls_logits", CLASSES)
        self.regression_head = RetinaNetSide("bbox_reg", 4)

    def forward(self, maps: list[Tensor]) -> dict[str, Tensor]:
        return {"cls_logits": self.classification_head(maps), "bbox_regression": self.regression_head(maps)}


class AnchorGenerator(nn.Module):
    """Boxes of whole half sides around the points of each map's grid, as corners [L, 4]."""

    def __init__(self):
        super().__init__()
        high = torch.tensor(RATIOS).sqrt()[:, None]
        scales = [torch.tensor(sizes, dtype=high.dtype) for sizes in SIZES]
        sides = [torch.stack([s / high, s * high], 2).flatten(0, 1) for s in scales]
        self.cell_anchors = [(torch.cat([-side, side], 1) / 2).round() for side in sides]

    def forward(self, images: Tensor, maps: list[Tensor]) -> Tensor:
        anchors = []
        for x, cell in zip(maps, self.cell_anchors, strict=True):
            (high, wide), (rows, columns) = images.shape[2:], x.shape[2:]
            y, x_ = torch.arange(rows) * (high // rows), torch.arange(columns) * (wide // columns)
            y, x_ = torch.meshgrid(y, x_, indexing="ij")
            anchors.append(torch.stack([x_, y, x_, y], 2).to(x).reshape(-1, 1, 4) + cell.to(x))
        return torch.cat([boxes.flatten(0, 1) for boxes in anchors])


class BoxCoder(nn.Module):
    def __init__(self, bbox_xform_clip: float = 0.5):
        super().__init__()
        self.bbox_xform_clip = bbox_xform_clip

    def forward(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        size = anchors[:, 2:] - anchors[:, :2]
        centers = deltas[..., :2] * size + anchors[:, :2] + 0.5 * size
        half = 0.5 * deltas[..., 2:].clamp(max=self.bbox_xform_clip).exp() * size
        return torch.cat([centers - half, centers + half], -1)


class RetinaNet(nn.Module):
    """Images [N, 3, H, W] -> logits [N, L, K], deltas and boxes [N, L, 4], the pyramid's maps by name."""

    def __init__(self):
        super().__init__()
        fpn = FeaturePyramidNetwork((16, 24, 32))
        self.backbone = nn.Sequential(OrderedDict(body=IntermediateLayerGetter(), fpn=fpn))
        self.anchor_generator, self.head, self.box_coder = AnchorGenerator(), RetinaNetHead(), BoxCoder()
        for name, weight in self.named_parameters():
            gain = 0.3 if "bbox" in name or "cls" in name else 0.6 if "fpn" in name else 1.2
            nn.init.normal_(weight, std=gain / weight[0].numel() ** 0.5 if weight.ndim > 1 else 0.2)
        self.head.classification_head.cls_logits.bias.data -= 2

    def forward(self, images: Tensor) -> dict[str, Tensor | dict[str, Tensor]]:
        features = self.backbone(images)
        maps = list(features.values())
        outputs, anchors = self.head(maps), self.anchor_generator(images, maps)
        return {**outputs, "boxes": self.box_coder(outputs["bbox_regression"], anchors), "features": features}


def scenes() -> tuple[Tensor, dict[str, Tensor]]:
    """Images with a coloured box; each anchor's class, -1 if none, -2 if ignored; deltas of the others."""
    images, grids = 0.4 * torch.randn(IMAGES, 3, *SHAPE), ((13, 11), (7, 6), (4, 3), (2, 2), (1, 1))
    low, high = AnchorGenerator()(images, [torch.empty(1, 1, *grid) for grid in grids]).split(2, 1)
    size = 10 + 22 * torch.rand(IMAGES, 1, 2)
    first = torch.rand(IMAGES, 1, 2) * (torch.tensor(SHAPE[::-1]) - size)
    end, kinds = first + size, torch.randint(CLASSES, (IMAGES, 1))
    for n, ((left, up), (right, down)) in enumerate(torch.cat([first, end], 1).long().tolist()):
        images[n, kinds[n], up:down, left:right] += 2
    both = (torch.minimum(high, end) - torch.maximum(low, first)).clamp(min=0).prod(2)
    shared = both / ((high - low).prod(1) + size.prod(2) - both)
    found = (shared >= 0.5) | (shared == shared.amax(1, keepdim=True))
    labels = torch.where(found, kinds, -1 - (shared >= 0.4).long())
    deltas = torch.cat([(first + end - low - high) / 2 / (high - low), (size / (high - low)).log()], 2)
    return images, {"labels": labels, "positives": found.nonzero(), "deltas": deltas[found]}


def detection(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """The focal loss of all anchors but the ignored, a smooth distance of deltas, over the positives."""
    labels, (image, anchor) = target["labels"], target["positives"].unbind(1)
    counted, count = labels > -2, max(len(image), 1)
    logits = outputs["cls_logits"][counted]
    truth = F.one_hot(labels[counted] + 1, CLASSES + 1)[:, 1:].to(logits)
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    focal = ((0.75 - 0.5 * truth) * (truth - logits.sigmoid()).square() * entropy).sum()
    deltas = outputs["bbox_regression"][image, anchor]
    apart = F.smooth_l1_loss(deltas, target["deltas"].to(deltas), reduction="sum", beta=1 / 9)
    return 0.03 * (focal + apart) / count
