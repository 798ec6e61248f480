"""A small Mask R-CNN: a pyramid on a residual body, and heads for the class, box and mask of given boxes."""

import math
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, BOXES, CLASSES, WIDTH, BOX_POOL, MASK_POOL, SCALE, LEVEL = 48, 64, 10, 5, 15, 4, 7, 20, 3
MEAN, STD, WEIGHTS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (10.0, 10.0, 5.0, 5.0)
conv = partial(nn.Conv2d, bias=False)


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        for name, low in {"weight": 1.5, "bias": -0.2, "running_mean": -0.2, "running_var": 0.6}.items():
            self.register_buffer(name, low + 0.5 * torch.rand(num_features))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class Bottleneck(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1):
        super().__init__()
        width, self.relu, self.downsample = 4 * planes, nn.ReLU(), None
        self.conv1, self.bn1 = conv(inplanes, planes, 1), FrozenBatchNorm2d(planes)
        self.conv2, self.bn2 = conv(planes, planes, 3, stride, 1), FrozenBatchNorm2d(planes)
        self.conv3, self.bn3 = conv(planes, width, 1), FrozenBatchNorm2d(width)
        if inplanes != width:
            self.downsample = nn.Sequential(conv(inplanes, width, 1, stride), FrozenBatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class IntermediateLayerGetter(nn.ModuleDict):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = {}
        for name, module in self.items():
            x = out[name] = module(x)
        return {name: features for name, features in out.items() if name.startswith("layer")}


class FeaturePyramidNetwork(nn.Module):
    def __init__(self, in_channels_list: tuple[int, ...], width: int):
        super().__init__()
        self.inner_blocks, self.layer_blocks = nn.ModuleList(), nn.ModuleList()
        for in_channels in in_channels_list:
            self.inner_blocks.append(nn.Sequential(nn.Conv2d(in_channels, width, 1)))
            self.layer_blocks.append(nn.Sequential(nn.Conv2d(width, width, 3, padding=1)))

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        names, x = x.keys(), list(x.values())
        last_inner = self.inner_blocks[-1](x[-1])
        results = [self.layer_blocks[-1](last_inner)]
        for idx in range(len(x) - 2, -1, -1):
            inner_top_down = F.interpolate(last_inner, size=x[idx].shape[-2:], mode="nearest")
            last_inner = self.inner_blocks[idx](x[idx]) + inner_top_down
            results.insert(0, self.layer_blocks[idx](last_inner))
        return dict(zip(names, results, strict=True))


class MultiScaleRoIAlign(nn.Module):
    def __init__(self, output_size: int, sampling_ratio: int = 2):
        super().__init__()
        self.output_size, self.sampling_ratio = output_size, sampling_ratio

    def roi_align(self, x: Tensor, boxes: Tensor, owners: Tensor) -> Tensor:
        """The mean of each bin's samples: not ``aligned``, so without half a pixel's offset."""
        start, end = boxes.split(2, 1)
        bins = (end - start).clamp(min=1) / self.output_size
        steps = (torch.arange(self.output_size * self.sampling_ratio).to(x) + 0.5) / self.sampling_ratio
        w, h = (start[..., None] + bins[..., None] * steps).unbind(1)
        h, w = h.clamp(0, x.shape[2] - 1)[:, :, None], w.clamp(0, x.shape[3] - 1)[:, None]
        top, left, bottom, right = h.long(), w.long(), h.ceil().long(), w.ceil().long()
        n, lh, lw, x = owners[:, None, None], h - top, w - left, x.transpose(0, 1)
        upper = x[:, n, top, left] * (1 - lw) + x[:, n, top, right] * lw
        lower = x[:, n, bottom, left] * (1 - lw) + x[:, n, bottom, right] * lw
        return F.avg_pool2d((upper * (1 - lh) + lower * lh).transpose(0, 1), self.sampling_ratio)

    def forward(self, x: dict[str, Tensor], boxes: Tensor, owners: Tensor) -> Tensor:
        s = torch.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
        levels = torch.floor(LEVEL + torch.log2(s / SCALE) + 1e-6).clamp(2, 4)
        result = boxes.new_zeros(len(boxes), WIDTH, self.output_size, self.output_size)
        for level, features in enumerate(x.values(), 2):
            idx = torch.where(levels == level)[0]
            result[idx] = self.roi_align(features, boxes[idx] / 2**level, owners[idx])
        return result


class TwoMLPHead(nn.Module):
    def __init__(self, in_channels: int, representation_size: int):
        super().__init__()
        self.fc6, self.fc7 = (nn.Linear(n, representation_size) for n in (in_channels, representation_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc7(F.relu(self.fc6(x.flatten(start_dim=1)))))


class FastRCNNPredictor(nn.Module):
    def __init__(self, in_channels: int, num_classes: int):
        super().__init__()
        self.cls_score, self.bbox_pred = (nn.Linear(in_channels, n * num_classes) for n in (1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x)


class RoIHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.box_roi_pool, self.mask_roi_pool = MultiScaleRoIAlign(BOX_POOL), MultiScaleRoIAlign(MASK_POOL)
        self.box_head = TwoMLPHead(WIDTH * BOX_POOL**2, 30)
        self.box_predictor = FastRCNNPredictor(30, CLASSES)
        layers = (nn.Conv2d(*widths, 3, 1, 1) for widths in ((WIDTH, 13), (13, 13), (13, 11)))
        self.mask_head = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
        up = {"conv5_mask": nn.ConvTranspose2d(11, 9, 2, 2), "relu": nn.ReLU()}
        self.mask_predictor = nn.Sequential(OrderedDict(up, mask_fcn_logits=nn.Conv2d(9, CLASSES, 1)))

    def decode(self, box_regression: Tensor, boxes: Tensor, limits: Tensor) -> Tensor:
        low, high = boxes[:, None].split(2, 2)
        codes, size = box_regression.unflatten(1, (-1, 4)) / boxes.new_tensor(WEIGHTS), high - low
        center = low + 0.5 * size + codes[..., :2] * size
        half = 0.5 * torch.exp(codes[..., 2:].clamp(max=math.log(1000 / 16))) * size
        return torch.cat([center - half, center + half], 2).clamp(min=0).minimum(limits.repeat(1, 2)[:, None])

    def forward(self, features: dict, boxes: Tensor, owners: Tensor, shapes: Tensor) -> tuple[Tensor, ...]:
        box_features = self.box_head(self.box_roi_pool(features, boxes, owners))
        class_logits, box_regression = self.box_predictor(box_features)
        mask_logits = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, owners)))
        if self.training:
            return class_logits, box_regression, mask_logits
        boxes = self.decode(box_regression, boxes, shapes.flip(1)[owners].to(boxes))
        return class_logits.softmax(1), boxes, mask_logits.sigmoid()


class GeneralizedRCNNTransform(nn.Module):
    def forward(self, images: Tensor, shapes: Tensor) -> Tensor:
        mean, std = (images.new_tensor(values)[:, None, None] for values in (MEAN, STD))
        batched_imgs = torch.zeros_like(images)
        for i, (h, w) in enumerate(shapes.tolist()):
            batched_imgs[i, :, :h, :w].copy_((images[i, :, :h, :w] - mean) / std)
        return batched_imgs


class MaskRCNN(nn.Module):
    def __init__(self):
        super().__init__()
        stem = (conv(3, 8, 7, 2, 3), FrozenBatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        firsts = Bottleneck(8, 5), Bottleneck(20, 6, 2), Bottleneck(24, 7, 2)
        layers = map(nn.Sequential, firsts, (Bottleneck(20, 5), Bottleneck(24, 6), Bottleneck(28, 7)))
        names = "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"
        body = IntermediateLayerGetter(zip(names, (*stem, *layers), strict=True))
        backbone = nn.Sequential(OrderedDict(body=body, fpn=FeaturePyramidNetwork((20, 24, 28), WIDTH)))
        self.transform, self.backbone, self.roi_heads = GeneralizedRCNNTransform(), backbone, RoIHeads()
        for parameter in self.roi_heads.parameters():
            parameter.data.mul_(1.5)

    def forward(self, images: Tensor, shapes: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, ...]:
        return self.roi_heads(self.backbone(self.transform(images, shapes)), boxes, owners, shapes)


def scenes() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Ellipses coloured by their class, boxes about them, and their classes, box codes and masks."""
    owners, label = torch.arange(BOXES) // 6, torch.randint(CLASSES, (BOXES, 1, 1))
    shapes = torch.tensor((HIGH, WIDE)) - torch.randint(12, (2, 2))
    lengths, limits = torch.tensor((33, 9, 18, 48, 25, 13, 10, 30, 50, 17)), shapes.flip(1)[owners]
    extent = (lengths[:, None] * torch.exp(0.3 * torch.randn(BOXES, 2))).minimum(0.9 * limits)
    center = extent / 2 + torch.rand(BOXES, 2) * (limits - extent)
    low, high = (center + extent * (0.2 * torch.rand(BOXES, 2) + x) for x in (-0.6, 0.4))
    low, high = low.clamp(min=0), high.minimum(limits)
    pixels = torch.cartesian_prod(torch.arange(HIGH), torch.arange(WIDE)).flip(1) + 0.5
    ticks = torch.cartesian_prod(torch.arange(14), torch.arange(14)).flip(1) + 0.5
    points = torch.cat([pixels.expand(BOXES, -1, -1), low[:, None] + (high - low)[:, None] * ticks / 14], 1)
    inside = ((points - center[:, None]) / extent[:, None]).norm(dim=2).lt(0.5).float()
    paint, masks = inside.split([len(pixels), len(ticks)], 1)
    colour = 0.3 * torch.cos(2 * label + torch.arange(3)[:, None]) * (label > 0) * paint[:, None]
    images = (0.45 + 0.1 * torch.randn(2, 3, len(pixels))).index_add(0, owners, colour)
    images = (images * (pixels < shapes.flip(1)[:, None]).all(2)[:, None]).unflatten(2, (HIGH, WIDE))
    shift, growth = 10 * (center - (low + high) / 2) / (high - low), 5 * torch.log(extent / (high - low))
    inputs = {"images": images, "shapes": shapes, "boxes": torch.cat([low, high], 1), "owners": owners}
    return inputs, (label.flatten(), torch.cat([shift, growth], 1), masks.unflatten(1, (14, 14)))


def heads_loss(outputs: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> Tensor:
    """The mean of the losses of class, box and mask; of the boxes with an object the last two."""
    (class_logits, box_regression, mask_logits), (labels, codes, masks) = outputs, target
    pos = torch.where(labels > 0)[0]
    found = box_regression.reshape(len(labels), -1, 4)[pos, labels[pos]]
    box_loss = F.smooth_l1_loss(found, codes[pos].to(found), beta=1 / 9, reduction="sum") / len(labels)
    mask_loss = F.binary_cross_entropy_with_logits(mask_logits[pos, labels[pos]], masks[pos].to(found))
    return (F.cross_entropy(class_logits, labels) + box_loss + mask_loss) / 3
