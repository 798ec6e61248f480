"""A thin Faster R-CNN: a frozen-norm ResNet, its pyramid, anchors, and heads for given proposals."""

import math
from collections import OrderedDict as Named

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._seventeenth_retina_net import Bottleneck, FrozenBatchNorm2d

SHAPE, CLASSES, WIDTH, HIDDEN, SIDE, GROWTH = (56, 72), 4, 16, 32, 4, math.log(1.2)
GRIDS, SCALES, ASPECTS = ((14, 18), (7, 9), (4, 5), (2, 3)), (8, 16, 32, 64), (0.5, 1.0, 2.0)


class IntermediateLayerGetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False), FrozenBatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 4), Bottleneck(16, 4))
        self.layer2 = nn.Sequential(Bottleneck(16, 6, 2))
        self.layer3 = nn.Sequential(Bottleneck(24, 8, 2))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        middle = self.layer2(fine)
        return [fine, middle, self.layer3(middle)]


class FeaturePyramidNetwork(nn.Module):
    def __init__(self, *widths: int):
        super().__init__()
        self.inner_blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(w, WIDTH, 1)) for w in widths)
        self.layer_blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)) for _ in widths)
        self.extra_blocks = nn.MaxPool2d(1, 2)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        inner = [block(x) for block, x in zip(self.inner_blocks, maps, strict=True)]
        for i in range(len(inner) - 1, 0, -1):
            inner[i - 1] = inner[i - 1] + F.interpolate(inner[i], inner[i - 1].shape[2:], mode="nearest")
        results = [block(x) for block, x in zip(self.layer_blocks, inner, strict=True)]
        return [*results, self.extra_blocks(results[-1])]


class Head(nn.ModuleDict):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        *layers, scores, deltas = self.values()
        for layer in layers:
            x = layer(x)
        return scores(x), deltas(x)


class AnchorGenerator(nn.Module):
    """Rounded boxes of one size and three shapes around the first corner of each cell of a level."""

    def forward(self, images: Tensor, maps: list[Tensor]) -> Tensor:
        rows, high = [], torch.tensor(ASPECTS).to(images).sqrt()
        for scale, grid in zip(SCALES, [x.shape[2:] for x in maps], strict=True):
            half = scale / 2 * torch.stack([1 / high, high], 1)
            starts = [torch.arange(n) * (s // n) for n, s in zip(grid, images.shape[2:], strict=True)]
            shifts = torch.cartesian_prod(*starts).flip(1).repeat(1, 2).to(images)
            rows.append((shifts[:, None] + torch.cat([-half, half], 1).round()).flatten(0, 1))
        return torch.cat(rows)


class BoxCoder(nn.Module):
    """Boxes moved and sized by weighted deltas, by which a side grows only so much."""

    def __init__(self, *weights: float):
        super().__init__()
        self.weights, self.bbox_xform_clip = weights, GROWTH

    def forward(self, deltas: Tensor, boxes: Tensor) -> Tensor:
        size = boxes[..., 2:] - boxes[..., :2]
        moved, grown = (deltas / torch.tensor(self.weights).to(deltas)).split(2, -1)
        middle = boxes[..., :2] + 0.5 * size + moved * size
        half = 0.5 * grown.clamp(max=self.bbox_xform_clip).exp() * size
        return torch.cat([middle - half, middle + half], -1)


def clip_boxes_to_image(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Boxes [N, ..., 4] cut at the height and width [N, 2] of their image."""
    ends = sizes.flip(1).repeat(1, 2).to(boxes)
    return torch.minimum(boxes.clamp(min=0).movedim(0, -2), ends).movedim(-2, 0)


class RegionProposalNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.anchor_generator, self.box_coder = AnchorGenerator(), BoxCoder(1, 1, 1, 1)
        conv = nn.Sequential(nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.ReLU()))
        last = (nn.Conv2d(WIDTH, n * len(ASPECTS), 1) for n in (1, 4))
        self.head = Head(zip(("conv", "cls_logits", "bbox_pred"), (conv, *last), strict=True))

    def forward(self, images: Tensor, maps: list[Tensor], sizes: Tensor) -> list[Tensor]:
        both = zip(*map(self.head, maps), strict=True)
        logits, deltas = (torch.cat([x.movedim(1, 3).flatten(1) for x in y], 1) for y in both)
        deltas, anchors = deltas.unflatten(1, (-1, 4)), self.anchor_generator(images, maps)
        return [logits, deltas, clip_boxes_to_image(self.box_coder(deltas, anchors), sizes)]


class MultiScaleRoIAlign(nn.Module):
    """Boxes [N, R, 4] -> means of bilinear samples [N R, C, size, size] of the level that suits each."""

    canonical_scale, canonical_level, sampling_ratio = 32, 4, 2

    def forward(self, maps: list[Tensor], boxes: Tensor) -> Tensor:
        image, boxes = torch.ones(boxes.shape[:2]).nonzero()[:, 0].to(boxes.device), boxes.flatten(0, 1)
        extent = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
        level = (self.canonical_level + (extent / self.canonical_scale).log2() + 1e-6).floor().clamp(2, 4)
        pooled = maps[0].new_zeros(len(boxes), WIDTH, SIDE, SIDE)
        for i, x in enumerate(maps):
            rows = (level == i + 2).nonzero()[:, 0]
            pooled[rows] = self.align(x[image[rows]], boxes[rows] / 2 ** (i + 2))
        return pooled

    def align(self, x: Tensor, boxes: Tensor) -> Tensor:
        """The map of each box, and the box in units of its cells."""
        steps, shares = (torch.arange(SIDE * self.sampling_ratio).to(boxes) + 0.5) / SIDE, []
        for axis, length in ((1, x.shape[2]), (0, x.shape[3])):
            start, end = boxes[:, axis, None], boxes[:, axis + 2, None]
            at = (start + (end - start) * steps / self.sampling_ratio).clamp(0, length - 1)
            shares.append((1 - (at[:, :, None] - torch.arange(length).to(at)).abs()).relu())
        values = torch.einsum("rph,rchw,rqw->rcpq", shares[0], x, shares[1])
        return F.avg_pool2d(values, self.sampling_ratio)


class RoIHeads(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = nn.Linear(WIDTH * SIDE**2, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        layers = Named(flatten=nn.Flatten(), fc6=first, relu6=nn.ReLU(), fc7=second, relu7=nn.ReLU())
        self.box_roi_pool, self.box_head = MultiScaleRoIAlign(), nn.Sequential(layers)
        last = (nn.Linear(HIDDEN, n * CLASSES) for n in (1, 4))
        self.box_predictor = Head(zip(("cls_score", "bbox_pred"), last, strict=True))
        self.box_coder = BoxCoder(10, 10, 5, 5)

    def forward(self, maps: list[Tensor], proposals: Tensor, sizes: Tensor) -> list[Tensor]:
        logits, deltas = self.box_predictor(self.box_head(self.box_roi_pool(maps, proposals)))
        changes = deltas.view(*proposals.shape[:2], -1, 4)
        boxes = clip_boxes_to_image(self.box_coder(changes, proposals[:, :, None]), sizes)
        return [logits, deltas, boxes.flatten(0, 1)]


class FasterRCNN(nn.Module):
    """Padded images, boxes [N, R, 4], sizes [N, 2] -> logits, deltas and boxes of anchors and proposals."""

    def __init__(self):
        super().__init__()
        body, fpn = IntermediateLayerGetter(), FeaturePyramidNetwork(16, 24, 32)
        self.backbone = nn.Sequential(Named(body=body, fpn=fpn))
        self.rpn, self.roi_heads = RegionProposalNetwork(), RoIHeads()
        for name, weight in self.named_parameters():
            gain = 0.6 if "fpn" in name or "cls" in name else 1.2
            nn.init.normal_(weight, std=gain / weight[0].numel() ** 0.5 if weight.ndim > 1 else 0.2)

    def forward(self, images: Tensor, proposals: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        maps = self.backbone(images)
        values = self.rpn(images, maps, sizes) + self.roi_heads(maps[:3], proposals, sizes)
        names = ("objectness", "rpn_deltas", "rpn_boxes", "class_logits", "box_regression", "boxes")
        return dict(zip(names, values, strict=True))


def scenes() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Coloured boxes in noise, which pads too; proposals beside these, anchors near them and some others."""
    sizes = torch.tensor([[56, 58 + int(torch.randint(8, ()))], [50, 72]])
    images, ends, count = 0.4 * torch.randn(2, 3, *SHAPE), sizes.flip(1)[:, None], 6
    extent = torch.tensor([11, 11, 22, 22, 40, 40])[torch.rand(2, count).argsort(1)]
    extent = (extent * (0.92 + 0.16 * torch.rand(2, count)))[:, :, None]
    extent = extent * (torch.tensor([0.15, -0.15]) * (2 * torch.rand(2, count, 1) - 1)).exp()
    first = torch.rand(2, count, 2) * (ends - extent)
    proposals, labels = torch.cat([first, first + extent], 2), torch.randint(CLASSES, (2, count))
    labels[:, 0] = 1 + labels[:, 0] % (CLASSES - 1)
    deltas, maps = 0.8 * torch.randn(2, count, 4), [torch.empty(1, 1, *grid) for grid in GRIDS]
    boxes = clip_boxes_to_image(BoxCoder(10, 10, 5, 5)(deltas, proposals), sizes)
    for n in range(2):
        for label, (left, up, right, down) in zip(labels[n], boxes[n].long().tolist(), strict=True):
            images[n, label - 1, up:down, left:right] += 1.5 * (label > 0)
    anchors, (image, row) = AnchorGenerator()(images, maps), labels.nonzero().unbind(1)
    truth = boxes[image, row]
    found = (anchors[:, None] - truth).abs().sum(2).argsort(0)[:2]
    sides, goal = (x[..., 2:] - x[..., :2] for x in (anchors[found], truth))
    moved = (truth - anchors[found]).unflatten(2, (2, 2)).mean(2) / sides
    positives, others = (found + image * len(anchors)).flatten(), torch.randint(2 * len(anchors), (16,))
    sampled = torch.cat([positives, others]).unique()
    changes, deltas = torch.cat([moved, (goal / sides).log()], 2).flatten(0, 1), deltas.flatten(0, 1)
    names = ("sampled", "positives", "changes", "labels", "deltas")
    values = (sampled, positives, changes, labels.flatten(), deltas)
    return (images, proposals, sizes), dict(zip(names, values, strict=True))


def detection(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Whether sampled anchors hold a thing, what the proposals hold; how far the deltas of both are off."""
    sampled, positives, labels = (target[name] for name in ("sampled", "positives", "labels"))
    logits, rows = outputs["objectness"].flatten()[sampled], labels.nonzero()[:, 0]
    total = F.cross_entropy(outputs["class_logits"], labels)
    total = total + F.binary_cross_entropy_with_logits(logits, torch.isin(sampled, positives).to(logits))
    first = outputs["rpn_deltas"].flatten(0, 1)[positives] - target["changes"].to(logits)
    second = outputs["box_regression"].unflatten(1, (-1, 4))[rows, labels[rows]] - target["deltas"][rows]
    for apart, count in ((first, len(sampled)), (second.to(logits), len(labels))):
        total = total + F.smooth_l1_loss(apart, 0 * apart.detach(), reduction="sum", beta=1 / 9) / count
    return 0.1 * total
