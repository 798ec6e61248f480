"""A small FCOS: a residual backbone with frozen norms, FPN P3 to P7, shared heads, targets and losses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, WIDE, CLASSES, GROUPS, HIGH, LONG = (8, 10, 14, 18), 12, 5, 3, 96, 160
STRIDES, BOUNDS, RADIUS, PICTURES, MOST = (8, 16, 32, 64, 128), (-1, 8, 16, 32, 64, 1e8), 1.5, 2, 5


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", 0.8 + 0.4 * torch.rand(num_features))
        self.register_buffer("bias", 0.2 * torch.randn(num_features))
        self.register_buffer("running_mean", 0.2 * torch.randn(num_features))
        self.register_buffer("running_var", 0.5 + torch.rand(num_features))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


class Conv2d(nn.Conv2d):
    """A convolution without bias, and its frozen norm."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1):
        super().__init__(inputs, outputs, size, stride, size // 2, bias=False)
        self.norm = FrozenBatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.shortcut = Conv2d(inputs, outputs, 1, stride) if stride > 1 else None
        self.conv1, self.conv2 = Conv2d(inputs, outputs, 3, stride), Conv2d(outputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.conv1(x)))
        return F.relu(out + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Conv2d(3, WIDTHS[0], 3, 2)
        for i in range(3):
            a, b = WIDTHS[i : i + 2]
            self.add_module(f"res{i + 3}", nn.Sequential(BasicBlock(a, b, 2), BasicBlock(b, b, 1)))

    def forward(self, x: Tensor) -> list[Tensor]:
        c3 = self.res3(F.max_pool2d(F.relu(self.stem(x)), kernel_size=3, stride=2, padding=1))
        return [c3, c4 := self.res4(c3), self.res5(c4)]


class LastLevelP6P7(nn.Module):
    def __init__(self):
        super().__init__()
        self.p6, self.p7 = (nn.Conv2d(WIDE, WIDE, 3, 2, 1) for _ in range(2))

    def forward(self, p5: Tensor) -> list[Tensor]:
        return [p6 := self.p6(p5), self.p7(F.relu(p6))]


class FPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom_up = ResNet()
        for i, width in enumerate(WIDTHS[1:], 3):
            self.add_module(f"fpn_lateral{i}", nn.Conv2d(width, WIDE, 1))
            self.add_module(f"fpn_output{i}", nn.Conv2d(WIDE, WIDE, 3, padding=1))
        self.top_block = LastLevelP6P7()

    def forward(self, x: Tensor) -> list[Tensor]:
        c3, c4, c5 = self.bottom_up(x)
        top = self.fpn_lateral5(c5)
        p5 = self.fpn_output5(top)
        top = self.fpn_lateral4(c4) + F.interpolate(top, scale_factor=2.0, mode="nearest")
        p4 = self.fpn_output4(top)
        top = self.fpn_lateral3(c3) + F.interpolate(top, scale_factor=2.0, mode="nearest")
        return [self.fpn_output3(top), p4, p5, *self.top_block(p5)]


class FCOSHead(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("cls_tower", "bbox_tower"):
            layers = [(nn.Conv2d(WIDE, WIDE, 3, 1, 1), nn.GroupNorm(GROUPS, WIDE), nn.ReLU()) for _ in "12"]
            self.add_module(name, nn.Sequential(*layers[0], *layers[1]))
        self.cls_logits = nn.Conv2d(WIDE, CLASSES, 3, 1, 1)
        self.bbox_pred, self.ctrness = nn.Conv2d(WIDE, 4, 3, 1, 1), nn.Conv2d(WIDE, 1, 3, 1, 1)
        self.scales = nn.ParameterList(0.8 + 0.6 * torch.rand(1) for _ in STRIDES)

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], ...]:
        logits, bbox_reg, ctrness = [], [], []
        for scale, feature in zip(self.scales, x, strict=True):
            bbox_tower = self.bbox_tower(feature)
            logits.append(self.cls_logits(self.cls_tower(feature)))
            ctrness.append(self.ctrness(bbox_tower))
            bbox_reg.append(torch.exp(scale * self.bbox_pred(bbox_tower)))
        return logits, bbox_reg, ctrness


class IOULoss(nn.Module):
    """One less the generalized IoU of distances to the left, the top, the right and the bottom."""

    def forward(self, pred: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        (a, b, c, d), (e, f, g, h) = pred.unbind(-1), target.unbind(-1)
        meet = (torch.min(a, e) + torch.min(c, g)) * (torch.min(b, f) + torch.min(d, h))
        hull = (torch.max(a, e) + torch.max(c, g)) * (torch.max(b, f) + torch.max(d, h))
        union = (a + c) * (b + d) + (e + g) * (f + h) - meet
        return ((1 - meet / union + (hull - union) / hull) * weight).sum()


class FCOSOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc_loss_func = IOULoss()

    @torch.no_grad()
    def compute_targets(self, locations: list[Tensor], boxes: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The class of each location, the last for the background, and its distances by the stride."""
        level = torch.cat([torch.full_like(x[:, 0], i) for i, x in enumerate(locations)]).long()
        stride, bound = (torch.tensor(x).to(boxes)[:, None] for x in (STRIDES, BOUNDS))
        xy, stride, low, high = torch.cat(locations)[:, None], stride[level], bound[level], bound[level + 1]
        first, last = boxes[:, None, :, :2], boxes[:, None, :, 2:]
        reg = torch.cat([xy - first, last - xy], -1)
        center, reach = (first + last) / 2, stride[..., None] * RADIUS
        inside = (reg.amin(-1) > 0) & ((xy - center).abs() < reach).all(-1)
        ok = inside & (reg.amax(-1) >= low) & (reg.amax(-1) <= high) & (labels >= 0)[:, None]
        area = (last - first).prod(-1).masked_fill(~ok, 1e8)
        least, index = area.min(-1)
        kind = labels.gather(1, index).masked_fill(least == 1e8, CLASSES)
        return kind, reg.gather(2, index[..., None, None].expand(-1, -1, 1, 4))[:, :, 0] / stride

    def forward(self, logits, reg, ctrness, locations, boxes, labels) -> dict[str, Tensor]:
        logits, reg, ctr = (torch.cat([x.flatten(2) for x in y], 2).mT for y in (logits, reg, ctrness))
        kind, goal = self.compute_targets(locations, boxes, labels)
        pos = kind != CLASSES
        count, p = pos.sum().clamp(min=1), logits.sigmoid()
        hot = F.one_hot(kind, CLASSES + 1)[..., :-1].to(logits)
        entropy = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")
        focal = (0.25 * hot + 0.75 * (1 - hot)) * (1 - p * hot - (1 - p) * (1 - hot)) ** 2 * entropy
        goal = goal[pos]
        across, down = goal[:, 0::2], goal[:, 1::2]
        weight = torch.sqrt(across.amin(1) / across.amax(1) * (down.amin(1) / down.amax(1)))
        loc = self.loc_loss_func(reg[pos], goal, weight) / weight.sum().clamp(min=1e-6)
        centre = F.binary_cross_entropy_with_logits(ctr[..., 0][pos], weight, reduction="sum") / count
        out = {"loss_fcos_cls": focal.sum() / count, "loss_fcos_loc": loc, "loss_fcos_ctr": centre}
        return out if self.training else out | {"scores": torch.sqrt(p * ctr.sigmoid()), "bbox_reg": reg}


class FCOS(nn.Module):
    """Pictures, their boxes and labels (-1 where padded) -> losses; in evaluation scores and distances."""

    def __init__(self):
        super().__init__()
        self.backbone, self.fcos_head, self.fcos_outputs = FPN(), FCOSHead(), FCOSOutputs()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=(1.2 / module.weight[0].numel()) ** 0.5)
            if getattr(module, "bias", None) is not None and not isinstance(module, FrozenBatchNorm2d):
                nn.init.normal_(module.bias, std=0.1)
            if isinstance(module, nn.GroupNorm):
                nn.init.uniform_(module.weight, 0.8, 1.2)
        nn.init.normal_(self.fcos_head.cls_logits.bias, -3, 0.1)

    def compute_locations(self, feature: Tensor, stride: int) -> Tensor:
        y, x = (torch.arange(n).to(feature) * stride for n in feature.shape[2:])
        y, x = torch.meshgrid(y, x, indexing="ij")
        return torch.stack([x.flatten(), y.flatten()], 1) + stride // 2

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        features = self.backbone(images)
        locations = [self.compute_locations(x, s) for x, s in zip(features, STRIDES, strict=True)]
        return self.fcos_outputs(*self.fcos_head(features), locations, boxes, labels)


def rectangles() -> tuple[dict[str, Tensor], Tensor]:
    """Rectangles from large to small, each brighter in the colour of its class."""
    scale = torch.tensor([0.9, 0.6, 0.4, 0.25, 0.15]) * (0.8 + 0.2 * torch.rand(PICTURES, MOST))
    size = torch.stack([scale * LONG, scale * HIGH * (0.8 + 0.2 * torch.rand(PICTURES, MOST))], -1)
    first = torch.rand(PICTURES, MOST, 2) * (torch.tensor([LONG, HIGH]) - size)
    boxes, labels = torch.cat([first, first + size], -1), torch.randint(CLASSES, (PICTURES, MOST))
    labels[1:, 4:], boxes[1:, 4:] = -1, 0
    images = 0.1 * torch.randn(PICTURES, 3, HIGH, LONG)
    for i in range(PICTURES):
        for (a, b, c, d), k in zip(boxes[i].int().tolist(), labels[i].tolist(), strict=True):
            images[i, k % 3, b:d, a:c] += 0.4 + 0.2 * k
    return {"images": images, "boxes": boxes, "labels": labels}, labels


def summed(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return sum(outputs[f"loss_fcos_{x}"] for x in ("cls", "loc", "ctr")) / 8
