"""A small SiamRPN tracker: two levels of depthwise correlation between a template and a search picture."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAIRS, HIGH, WIDE, ADJUSTED, HIDDEN = 3, 9, 6, 16, 12
SHAPES = ((1.5, 3.0), (2.2, 2.0), (3.4, 1.3))
KINDS = len(SHAPES)


def conv(inputs: int, outputs: int, size: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, size, stride, bias=bias)
    nn.init.normal_(layer.weight, std=1.2 / math.sqrt(inputs * size**2))
    return layer


def norm(width: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(width)
    nn.init.normal_(layer.weight, 1, 0.2), nn.init.normal_(layer.bias, std=0.2)
    nn.init.normal_(layer.running_mean, std=0.2), nn.init.uniform_(layer.running_var, 0.6, 1.4)
    return layer


def xcorr_depthwise(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel of each search picture under that of its template; the batch is folded into groups."""
    batch, channel = kernel.shape[:2]
    x = x.view(1, batch * channel, x.size(2), x.size(3))
    kernel = kernel.view(batch * channel, 1, kernel.size(2), kernel.size(3))
    out = F.conv2d(x, kernel, groups=batch * channel)
    return out.view(batch, channel, out.size(2), out.size(3))


def select_cross_entropy_loss(pred: Tensor, label: Tensor) -> Tensor:
    """Half the mean over the positive anchors, and half that over the negative; -1 is neither."""
    pred, label = pred.view(-1, 2), label.view(-1)
    pos, neg = label.eq(1).nonzero().squeeze(1), label.eq(0).nonzero().squeeze(1)
    loss_pos = F.nll_loss(pred.index_select(0, pos), label.index_select(0, pos))
    loss_neg = F.nll_loss(pred.index_select(0, neg), label.index_select(0, neg))
    return loss_pos * 0.5 + loss_neg * 0.5


def weight_l1_loss(pred_loc: Tensor, label_loc: Tensor, loss_weight: Tensor) -> Tensor:
    b, _, sh, sw = pred_loc.size()
    diff = F.smooth_l1_loss(pred_loc.view(b, 4, -1, sh, sw), label_loc, reduction="none").sum(dim=1)
    return (diff * loss_weight).sum().div(b)


class AlexNet(nn.Module):
    """Convolutions without padding; the features of the last two layers."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(conv(3, 10, 3, 2), norm(10), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(conv(10, 14, 3), norm(14), nn.ReLU(inplace=True))
        self.layer3 = nn.Sequential(conv(14, 18, 3), norm(18))

    def forward(self, x: Tensor) -> list[Tensor]:
        x2 = self.layer2(self.layer1(x))
        return [x2, self.layer3(x2)]


class AdjustLayer(nn.Module):
    """Another width; of a small map, as the template's, only the centre stays."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.downsample = nn.Sequential(conv(in_channels, out_channels, 1), norm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        if x.size(3) < 12:
            x = x[:, :, 1:-1, 1:-1]
        return x


class AdjustAllLayer(nn.Module):
    def __init__(self, in_channels: tuple[int, ...], out_channels: int):
        super().__init__()
        for i, width in enumerate(in_channels):
            self.add_module(f"downsample{i + 2}", AdjustLayer(width, out_channels))

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [getattr(self, f"downsample{i + 2}")(x) for i, x in enumerate(features)]


class DepthwiseXCorr(nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int):
        super().__init__()
        self.conv_kernel = nn.Sequential(conv(in_channels, hidden, 3), norm(hidden), nn.ReLU(inplace=True))
        self.conv_search = nn.Sequential(conv(in_channels, hidden, 3), norm(hidden), nn.ReLU(inplace=True))
        last = conv(hidden, out_channels, 1, bias=True)
        nn.init.normal_(last.weight, std=0.1), nn.init.normal_(last.bias, std=0.1)
        self.head = nn.Sequential(conv(hidden, hidden, 1), norm(hidden), nn.ReLU(inplace=True), last)

    def forward(self, kernel: Tensor, search: Tensor) -> Tensor:
        kernel, search = self.conv_kernel(kernel), self.conv_search(search)
        return self.head(xcorr_depthwise(search, kernel))


class DepthwiseRPN(nn.Module):
    def __init__(self, anchor_num: int, in_channels: int, out_channels: int):
        super().__init__()
        self.cls = DepthwiseXCorr(in_channels, out_channels, 2 * anchor_num)
        self.loc = DepthwiseXCorr(in_channels, out_channels, 4 * anchor_num)

    def forward(self, z_f: Tensor, x_f: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls(z_f, x_f), self.loc(z_f, x_f)


class MultiRPN(nn.Module):
    """The heads of the levels, averaged by learnt weights."""

    def __init__(self, anchor_num: int, levels: int):
        super().__init__()
        for i in range(levels):
            self.add_module(f"rpn{i + 2}", DepthwiseRPN(anchor_num, ADJUSTED, HIDDEN))
        self.cls_weight = nn.Parameter(0.7 * torch.randn(levels))
        self.loc_weight = nn.Parameter(0.7 * torch.randn(levels))

    def forward(self, z_fs: list[Tensor], x_fs: list[Tensor]) -> tuple[Tensor, Tensor]:
        pairs = [getattr(self, f"rpn{i + 2}")(*x) for i, x in enumerate(zip(z_fs, x_fs, strict=True))]
        cls_weight, loc_weight = F.softmax(self.cls_weight, 0), F.softmax(self.loc_weight, 0)
        cls = sum(w * pair[0] for w, pair in zip(cls_weight, pairs, strict=True))
        return cls, sum(w * pair[1] for w, pair in zip(loc_weight, pairs, strict=True))


def all_anchors() -> Tensor:
    """[4, K, H, W]: centre, width and height of each anchor, in steps of the map."""
    across = (torch.arange(WIDE) - (WIDE - 1) / 2).expand(KINDS, HIGH, WIDE)
    down = (torch.arange(HIGH) - (HIGH - 1) / 2)[:, None].expand(KINDS, HIGH, WIDE)
    sizes = torch.tensor(SHAPES).T[:, :, None, None].expand(2, KINDS, HIGH, WIDE)
    return torch.cat([torch.stack([across, down]), sizes])


class ModelBuilder(nn.Module):
    """A template, a search picture and the anchors' labels -> scores, boxes and the two losses."""

    def __init__(self):
        super().__init__()
        self.backbone = AlexNet()
        self.neck = AdjustAllLayer((14, 18), ADJUSTED)
        self.rpn_head = MultiRPN(KINDS, 2)
        self.register_buffer("anchors", all_anchors())

    def log_softmax(self, cls: Tensor) -> Tensor:
        b, a2, h, w = cls.size()
        cls = cls.view(b, 2, a2 // 2, h, w).permute(0, 2, 3, 4, 1).contiguous()
        return F.log_softmax(cls, dim=4)

    def convert_bbox(self, loc: Tensor) -> Tensor:
        delta, anchor = loc.view(loc.size(0), 4, -1, *loc.shape[2:]), self.anchors
        center = delta[:, :2] * anchor[2:] + anchor[:2]
        return torch.cat([center, torch.exp(delta[:, 2:]) * anchor[2:]], 1)

    def forward(
        self, template: Tensor, search: Tensor, label_cls: Tensor, label_loc: Tensor, label_weight: Tensor
    ) -> dict[str, Tensor]:
        zf, xf = self.neck(self.backbone(template)), self.neck(self.backbone(search))
        cls, loc = self.rpn_head(zf, xf)
        cls = self.log_softmax(cls)
        return {
            "score": cls[..., 1].exp(),
            "bbox": self.convert_bbox(loc),
            "cls_loss": select_cross_entropy_loss(cls, label_cls),
            "loc_loss": weight_l1_loss(loc, label_loc, label_weight),
        }


def pictures() -> tuple[dict[str, Tensor], Tensor]:
    """A coloured bump in the template and, moved and of another size, in the search picture."""
    box = torch.cat([2 * torch.rand(PAIRS, 2) - 1, 1.5 + 1.5 * torch.rand(PAIRS, 2)], 1)
    color = torch.randn(PAIRS, 3, 1, 1)

    def bump(high: int, wide: int, center: Tensor) -> Tensor:
        x = (torch.arange(wide) - wide / 2)[None] / 2 - center[:, :1]
        y = (torch.arange(high) - high / 2)[None] / 2 - center[:, 1:]
        x, y = x / box[:, 2:3], y / box[:, 3:]
        shape = torch.exp(-(x**2)[:, None, None, :] - (y**2)[:, None, :, None])
        return color * shape + 0.2 * torch.randn(PAIRS, 3, high, wide)

    anchors, true = all_anchors(), box[:, :, None, None, None]
    move, size = (true[:, :2] - anchors[:2]) / anchors[2:], (true[:, 2:] / anchors[2:]).log()
    label_loc = torch.cat([move, size], 1)
    order = label_loc.abs().sum(1).flatten(1).argsort(1).argsort(1).view(PAIRS, KINDS, HIGH, WIDE)
    label_cls = torch.where(order < 7, 1, torch.where(order < 40, -1, 0))
    weight = (order < 7) / 7 * (0.5 + torch.rand(order.shape))
    inputs = {"template": bump(24, 27, torch.zeros(PAIRS, 2)), "search": bump(36, 33, box[:, :2])}
    return inputs | {"label_cls": label_cls, "label_loc": label_loc, "label_weight": weight}, box


def tracking_loss(outputs: dict[str, Tensor], box: Tensor) -> Tensor:
    """Both losses and the distance of the expected box, by eight."""
    score = outputs["score"][:, None]
    mean = (score * outputs["bbox"]).sum((2, 3, 4)) / score.sum((2, 3, 4))
    return (outputs["cls_loss"] + 1.2 * outputs["loc_loss"] + 0.3 * F.smooth_l1_loss(mean, box)) / 8
