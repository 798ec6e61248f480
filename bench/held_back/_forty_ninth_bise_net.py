"""A small BiSeNetV2: a detail and a semantic branch, their guided aggregation, a head and two boosters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, PICTURES, HIGH, WIDE, IGNORED = 5, 2, 64, 96, 255
DETAIL, SEMANTIC, JOINT = (6, 9), (8, 10, 12), 14
CLASS_WEIGHTS = (0.7, 1.0, 1.6, 1.2, 0.9)


class ConvBNReLU(nn.Module):
    def __init__(self, in_chan: int, out_chan: int, ks: int = 3, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(in_chan, out_chan, ks, stride, ks // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_chan)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


def conv_bn(in_chan: int, out_chan: int, ks: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(in_chan, out_chan, ks, stride, ks // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out_chan)]


class DetailBranch(nn.Module):
    def __init__(self):
        super().__init__()
        one, two = DETAIL
        self.S1 = nn.Sequential(ConvBNReLU(3, one, stride=2), ConvBNReLU(one, one))
        self.S2 = nn.Sequential(ConvBNReLU(one, two, stride=2), ConvBNReLU(two, two))
        self.S3 = nn.Sequential(ConvBNReLU(two, JOINT, stride=2), ConvBNReLU(JOINT, JOINT))

    def forward(self, x: Tensor) -> Tensor:
        return self.S3(self.S2(self.S1(x)))


class StemBlock(nn.Module):
    def __init__(self, chan: int):
        super().__init__()
        self.conv = ConvBNReLU(3, chan, stride=2)
        self.left = nn.Sequential(ConvBNReLU(chan, chan // 2, 1), ConvBNReLU(chan // 2, chan, stride=2))
        self.right = nn.MaxPool2d(3, stride=2, padding=1)
        self.fuse = ConvBNReLU(2 * chan, chan)

    def forward(self, x: Tensor) -> Tensor:
        feat = self.conv(x)
        return self.fuse(torch.cat([self.left(feat), self.right(feat)], dim=1))


class CEBlock(nn.Module):
    """The average is taken down each column only: a norm of one picture has to see several values."""

    def __init__(self, chan: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(chan)
        self.conv_gap = ConvBNReLU(chan, chan, 1)
        self.conv_last = ConvBNReLU(chan, chan)

    def forward(self, x: Tensor) -> Tensor:
        feat = torch.mean(x, dim=2, keepdim=True)
        feat = self.conv_gap(self.bn(feat))
        return self.conv_last(feat + x)


class GELayerS1(nn.Module):
    def __init__(self, in_chan: int, out_chan: int, exp_ratio: int = 6):
        super().__init__()
        mid = in_chan * exp_ratio
        self.conv1 = ConvBNReLU(in_chan, in_chan)
        self.dwconv = nn.Sequential(*conv_bn(in_chan, mid, groups=in_chan), nn.ReLU())
        self.conv2 = nn.Sequential(*conv_bn(mid, out_chan, 1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        feat = self.conv2(self.dwconv(self.conv1(x)))
        return self.relu(feat + x)


class GELayerS2(nn.Module):
    def __init__(self, in_chan: int, out_chan: int, exp_ratio: int = 6):
        super().__init__()
        mid = in_chan * exp_ratio
        self.conv1 = ConvBNReLU(in_chan, in_chan)
        self.dwconv1 = nn.Sequential(*conv_bn(in_chan, mid, stride=2, groups=in_chan))
        self.dwconv2 = nn.Sequential(*conv_bn(mid, mid, groups=mid), nn.ReLU())
        self.conv2 = nn.Sequential(*conv_bn(mid, out_chan, 1))
        down = conv_bn(in_chan, in_chan, stride=2, groups=in_chan)
        self.shortcut = nn.Sequential(*down, *conv_bn(in_chan, out_chan, 1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        feat = self.conv2(self.dwconv2(self.dwconv1(self.conv1(x))))
        return self.relu(feat + self.shortcut(x))


class SegmentBranch(nn.Module):
    def __init__(self):
        super().__init__()
        stem, three, four = SEMANTIC
        self.S1S2 = StemBlock(stem)
        self.S3 = nn.Sequential(GELayerS2(stem, three), GELayerS1(three, three))
        self.S4 = nn.Sequential(GELayerS2(three, four), GELayerS1(four, four))
        self.S5_4 = nn.Sequential(GELayerS2(four, JOINT), GELayerS1(JOINT, JOINT))
        self.S5_5 = CEBlock(JOINT)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        feat2 = self.S1S2(x)
        feat3 = self.S3(feat2)
        return feat2, feat3, self.S5_5(self.S5_4(self.S4(feat3)))


class BGALayer(nn.Module):
    def __init__(self, chan: int):
        super().__init__()
        self.left1 = nn.Sequential(*conv_bn(chan, chan, groups=chan), nn.Conv2d(chan, chan, 1, bias=False))
        self.left2 = nn.Sequential(*conv_bn(chan, chan, stride=2), nn.AvgPool2d(3, stride=2, padding=1))
        self.right1 = nn.Sequential(*conv_bn(chan, chan))
        self.right2 = nn.Sequential(*conv_bn(chan, chan, groups=chan), nn.Conv2d(chan, chan, 1, bias=False))
        self.up1, self.up2 = nn.Upsample(scale_factor=4), nn.Upsample(scale_factor=4)
        self.conv = nn.Sequential(*conv_bn(chan, chan), nn.ReLU())

    def forward(self, x_d: Tensor, x_s: Tensor) -> Tensor:
        left1, left2 = self.left1(x_d), self.left2(x_d)
        right1, right2 = self.up1(self.right1(x_s)), self.right2(x_s)
        left = left1 * torch.sigmoid(right1)
        right = self.up2(left2 * torch.sigmoid(right2))
        return self.conv(left + right)


class SegmentHead(nn.Module):
    def __init__(self, in_chan: int, mid_chan: int, up_factor: int):
        super().__init__()
        self.conv = ConvBNReLU(in_chan, mid_chan)
        up = nn.Upsample(scale_factor=up_factor, mode="bilinear", align_corners=False)
        self.conv_out = nn.Sequential(nn.Conv2d(mid_chan, CLASSES, 1), up)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_out(self.conv(x))


class BiSeNetV2(nn.Module):
    """Pictures -> logits of every pixel; in training those of two boosters too."""

    def __init__(self):
        super().__init__()
        self.detail, self.segment, self.bga = DetailBranch(), SegmentBranch(), BGALayer(JOINT)
        self.head = SegmentHead(JOINT, 16, 8)
        self.aux2 = SegmentHead(SEMANTIC[0], 11, 4)
        self.aux3 = SegmentHead(SEMANTIC[1], 13, 8)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, 0, 0.2)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        feat_d = self.detail(x)
        feat2, feat3, feat_s = self.segment(x)
        logits = self.head(self.bga(feat_d, feat_s))
        if self.training:
            return logits, self.aux2(feat2), self.aux3(feat3)
        return (logits,)


def scenes() -> tuple[Tensor, Tensor]:
    """Discs and a road before a sky, each class of its own colour; their rims are not labelled."""
    down, across = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    label = (down > 36 + 4 * torch.sin(across / 9)).long().repeat(PICTURES, 1, 1)
    for picture in label:
        for kind in range(2, CLASSES):
            y, x, size = torch.rand(3).tolist()
            away = ((down - HIGH * y).square() + (across - WIDE * x).square()).sqrt() - 9 - 9 * size
            picture[away < 0] = kind
            picture[away.abs() < 0.7] = IGNORED
    colours = torch.tensor([(0.2, 0.5, 1.1), (0.4, 0.3, 0.2), (1, 0.1, 0.3), (0.1, 0.9, 0.2), (0.8, 0.8, 0)])
    image = colours[label.where(label != IGNORED, 0)].movedim(3, 1)
    return image + 0.3 * torch.randn_like(image) - 0.4, label


def boosted_cross_entropy(outputs: tuple[Tensor, ...], label: Tensor) -> Tensor:
    """The weighted cross entropy of all heads, by four."""
    weight = outputs[0].new_tensor(CLASS_WEIGHTS)
    return sum(F.cross_entropy(y, label, weight, ignore_index=IGNORED) for y in outputs) / 4
