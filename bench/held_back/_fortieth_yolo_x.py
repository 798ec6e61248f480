"""A small YOLOX: a CSPDarknet of two kept scales, a PAFPN, a decoupled head and its losses."""

import math

import torch
from torch import Tensor, nn

HIGH, WIDE, CLASSES, PICTURES = 48, 64, 5, 2
WIDTHS, HEAD, STRIDES, POOLS = (6, 10, 14, 18), 12, (8, 16), (3, 5, 7)


class BaseConv(nn.Module):
    """A convolution without bias, a batch norm and silu."""

    def __init__(self, in_channels: int, out_channels: int, ksize: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, ksize, stride, ksize // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03), nn.SiLU()
        nn.init.normal_(self.conv.weight, std=1 / math.sqrt(in_channels * ksize**2))
        nn.init.normal_(self.bn.weight, 1.2, 0.2), nn.init.normal_(self.bn.bias, std=0.3)
        nn.init.normal_(self.bn.running_mean, std=0.2), nn.init.uniform_(self.bn.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Focus(nn.Module):
    """Puts what stands in squares of four pixels into channels."""

    def __init__(self, in_channels: int, out_channels: int, ksize: int):
        super().__init__()
        self.conv = BaseConv(in_channels * 4, out_channels, ksize)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., ::2], x[..., 1::2]
        corners = left[..., ::2, :], left[..., 1::2, :], right[..., ::2, :], right[..., 1::2, :]
        return self.conv(torch.cat(corners, dim=1))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, shortcut: bool):
        super().__init__()
        self.conv1, self.conv2 = BaseConv(channels, channels, 1), BaseConv(channels, channels, 3)
        self.use_add = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return y + x if self.use_add else y


class SPPBottleneck(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        hidden = channels // 2
        self.conv1 = BaseConv(channels, hidden, 1)
        self.m = nn.ModuleList([nn.MaxPool2d(size, stride=1, padding=size // 2) for size in POOLS])
        self.conv2 = BaseConv(hidden * (len(POOLS) + 1), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv2(torch.cat([x] + [m(x) for m in self.m], dim=1))


class CSPLayer(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, n: int = 1, shortcut: bool = True):
        super().__init__()
        hidden = out_channels // 2
        self.conv1, self.conv2 = BaseConv(in_channels, hidden, 1), BaseConv(in_channels, hidden, 1)
        self.conv3 = BaseConv(2 * hidden, out_channels, 1)
        self.m = nn.Sequential(*(Bottleneck(hidden, shortcut) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        x_1, x_2 = self.m(self.conv1(x)), self.conv2(x)
        return self.conv3(torch.cat((x_1, x_2), dim=1))


class CSPDarknet(nn.Module):
    def __init__(self):
        super().__init__()
        a, b, c, d = WIDTHS
        self.stem = Focus(3, a, ksize=3)
        self.dark2 = nn.Sequential(BaseConv(a, b, 3, 2), CSPLayer(b, b))
        self.dark3 = nn.Sequential(BaseConv(b, c, 3, 2), CSPLayer(c, c, n=2))
        self.dark4 = nn.Sequential(BaseConv(c, d, 3, 2), SPPBottleneck(d), CSPLayer(d, d, shortcut=False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.dark3(self.dark2(self.stem(x)))
        return x, self.dark4(x)


class YOLOPAFPN(nn.Module):
    def __init__(self):
        super().__init__()
        (_, _, c, d), self.backbone = WIDTHS, CSPDarknet()
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.lateral_conv0, self.C3_p4 = BaseConv(d, c, 1), CSPLayer(2 * c, c, shortcut=False)
        self.bu_conv1, self.C3_n4 = BaseConv(c, c, 3, 2), CSPLayer(2 * c, d, shortcut=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x0 = self.backbone(x)
        fpn_out0 = self.lateral_conv0(x0)
        pan_out1 = self.C3_p4(torch.cat([self.upsample(fpn_out0), x1], 1))
        pan_out0 = self.C3_n4(torch.cat([self.bu_conv1(pan_out1), fpn_out0], 1))
        return pan_out1, pan_out0


class IOUloss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        tl = torch.max(pred[:, :2] - pred[:, 2:] / 2, target[:, :2] - target[:, 2:] / 2)
        br = torch.min(pred[:, :2] + pred[:, 2:] / 2, target[:, :2] + target[:, 2:] / 2)
        area_p, area_g = torch.prod(pred[:, 2:], 1), torch.prod(target[:, 2:], 1)
        area_i = torch.prod(br - tl, 1) * (tl < br).type(tl.type()).prod(dim=1)
        return 1 - (area_i / (area_p + area_g - area_i + 1e-16)) ** 2


def prediction(outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(HEAD, outputs, 1)
    nn.init.normal_(layer.weight, std=0.1), nn.init.normal_(layer.bias, std=0.3)
    return layer


def towers() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(*(BaseConv(HEAD, HEAD, 3) for _ in "12")) for _ in STRIDES)


class YOLOXHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.stems = nn.ModuleList(BaseConv(width, HEAD, 1) for width in WIDTHS[2:])
        self.cls_convs, self.reg_convs = towers(), towers()
        self.cls_preds = nn.ModuleList(prediction(CLASSES) for _ in STRIDES)
        self.reg_preds = nn.ModuleList(prediction(4) for _ in STRIDES)
        self.obj_preds = nn.ModuleList(prediction(1) for _ in STRIDES)
        self.iou_loss, self.bcewithlog_loss = IOUloss(), nn.BCEWithLogitsLoss(reduction="none")

    def get_output_and_grid(self, output: Tensor, stride: int) -> Tensor:
        hsize, wsize = output.shape[-2:]
        yv, xv = torch.meshgrid(torch.arange(hsize), torch.arange(wsize), indexing="ij")
        grid = torch.stack((xv, yv), 2).view(1, hsize * wsize, 2).to(output)
        output = output.flatten(2).permute(0, 2, 1)
        xy, wh = (output[..., :2] + grid) * stride, torch.exp(output[..., 2:4]) * stride
        return torch.cat([xy, wh, output[..., 4:]], -1)

    def get_losses(self, outputs: Tensor, masks: Tensor, boxes: Tensor, classes: Tensor) -> tuple:
        num_fg = masks.sum().clamp(min=1)
        iou = self.iou_loss(outputs[..., :4][masks], boxes[masks]).sum() / num_fg
        obj = self.bcewithlog_loss(outputs[..., 4], masks.to(outputs)).sum() / num_fg
        cls = self.bcewithlog_loss(outputs[..., 5:][masks], classes[masks]).sum() / num_fg
        return 5.0 * iou, obj, cls

    def forward(self, xin: tuple, fg_masks: Tensor, reg_targets: Tensor, cls_targets: Tensor) -> tuple:
        outputs = []
        for k, x in enumerate(xin):
            x = self.stems[k](x)
            cls_feat, reg_feat = self.cls_convs[k](x), self.reg_convs[k](x)
            reg, obj = self.reg_preds[k](reg_feat), self.obj_preds[k](reg_feat)
            output = torch.cat([reg, obj, self.cls_preds[k](cls_feat)], 1)
            outputs.append(self.get_output_and_grid(output, STRIDES[k]))
        outputs = torch.cat(outputs, 1)
        losses = self.get_losses(outputs, fg_masks, reg_targets, cls_targets)
        if not self.training:
            outputs = torch.cat([outputs[..., :4], outputs[..., 4:].sigmoid()], -1)
        return outputs, *losses


class YOLOX(nn.Module):
    """Pictures and what is assigned to each anchor -> predictions, and the losses of box, object, class."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = YOLOPAFPN(), YOLOXHead()

    def forward(self, x: Tensor, fg_masks: Tensor, reg_targets: Tensor, cls_targets: Tensor) -> tuple:
        return self.head(self.backbone(x), fg_masks, reg_targets, cls_targets)


def boxes_on_noise() -> tuple[dict[str, Tensor], Tensor]:
    """Two boxes a picture in the colours of their classes, given to the anchors about their centres."""
    steps = [torch.cartesian_prod(torch.arange(0, HIGH, s), torch.arange(0, WIDE, s)) for s in STRIDES]
    site = torch.cat([step + s / 2 for step, s in zip(steps, STRIDES, strict=True)]).flip(1)
    reach = torch.cat([step[:, 0] * 0 + 0.9 * s for step, s in zip(steps, STRIDES, strict=True)])
    x = 0.1 * torch.randn(PICTURES, 3, HIGH, WIDE)
    boxes, classes = torch.ones(PICTURES, len(site), 4), torch.zeros(PICTURES, len(site), CLASSES)
    masks = classes[..., 0] > 0
    for n in range(PICTURES):
        for kind in torch.randperm(CLASSES)[:2].tolist():
            middle, size = (0.2 + 0.6 * torch.rand(2)) * torch.tensor([WIDE, HIGH]), 10 + 14 * torch.rand(2)
            (left, top), (end, low) = (middle - size / 2).clamp(min=0).int(), (middle + size / 2).int()
            x[n, :, top:low, left:end] += torch.cos(kind + 2.0 * torch.arange(3))[:, None, None]
            near = ((site - middle).abs() < reach[:, None]).all(1)
            masks[n] |= near
            boxes[n, near] = torch.cat([middle, size])
            classes[n, near] = torch.eye(CLASSES)[kind] * (0.5 + 0.5 * torch.rand(near.sum(), 1))
    return {"x": x, "fg_masks": masks, "reg_targets": boxes, "cls_targets": classes}, masks


def whole_loss(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """The sum of the losses, by sixteen."""
    return sum(outputs[1:]) / 16
