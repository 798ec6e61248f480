"""A small residual network with modulated deformable convolutions (DCNv2) under a pyramid pooling head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, PICTURES, IGNORED, GROUPS = 14, 18, 5, 4, 255, 2


def bilinear(x: Tensor, py: Tensor, px: Tensor) -> Tensor:
    """[N, G, C, H, W] at the places [N, G, P], zero outside: [N, G, C, P]."""
    high, wide = x.shape[3:]
    flat, low_y, low_x, total = x.flatten(3), py.detach().floor(), px.detach().floor(), 0
    for dy in (0, 1):
        for dx in (0, 1):
            qy, qx = low_y + dy, low_x + dx
            inside = (qy >= 0) & (qy < high) & (qx >= 0) & (qx < wide)
            share = (1 - (py - qy).abs()) * (1 - (px - qx).abs()) * inside
            index = (qy.clamp(0, high - 1) * wide + qx.clamp(0, wide - 1)).long()
            index = index.unsqueeze(2).expand(-1, -1, x.shape[2], -1)
            total = total + flat.gather(3, index) * share.unsqueeze(2)
    return total


class ModulatedDeformConv2dPack(nn.Module):
    """A 3x3 convolution whose taps are moved and weighed by what another one says."""

    def __init__(self, inplanes: int, planes: int, stride: int, dilation: int, deform_groups: int):
        super().__init__()
        self.stride, self.dilation, self.deform_groups = stride, dilation, deform_groups
        self.weight = nn.Parameter(torch.empty(planes, inplanes, 3, 3))
        self.conv_offset = nn.Conv2d(inplanes, deform_groups * 27, 3, stride, dilation, dilation)

    def forward(self, x: Tensor) -> Tensor:
        o1, o2, mask = self.conv_offset(x).chunk(3, 1)
        offset, mask = torch.cat([o1, o2], 1).unflatten(1, (self.deform_groups, 9, 2)), mask.sigmoid()
        high, wide = mask.shape[2:]
        taps = (torch.arange(3, device=x.device) - 1) * self.dilation
        rows, columns = (torch.arange(size, device=x.device) * self.stride for size in (high, wide))
        py = offset[:, :, :, 0] + taps.repeat_interleave(3)[:, None, None] + rows[:, None]
        px = offset[:, :, :, 1] + taps.repeat(3)[:, None, None] + columns
        found = bilinear(x.unflatten(1, (self.deform_groups, -1)), py.flatten(2), px.flatten(2))
        found = found * mask.unflatten(1, (self.deform_groups, 1, 9)).flatten(3)
        found = found.flatten(1, 2).unflatten(2, (9, high, wide))
        return torch.einsum("nckhw,ock->nohw", found, self.weight.flatten(2))


class Bottleneck(nn.Module):
    expansion = 2

    def __init__(self, inplanes: int, planes: int, stride: int, dilation: int, dcn: bool):
        super().__init__()
        wide = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        if dcn:
            self.conv2 = ModulatedDeformConv2dPack(planes, planes, stride, dilation, GROUPS)
        else:
            self.conv2 = nn.Conv2d(planes, planes, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu, self.downsample = nn.ReLU(), None
        if inplanes != wide:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + identity)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.layer1 = self._make_layer(8, 6, 1, 1, False)
        self.layer2 = self._make_layer(12, 10, 2, 1, True)
        self.layer3 = self._make_layer(20, 14, 1, 2, True)

    def _make_layer(self, inplanes: int, planes: int, stride: int, dilation: int, dcn: bool) -> nn.Sequential:
        first = Bottleneck(inplanes, planes, stride, dilation, dcn)
        return nn.Sequential(first, Bottleneck(planes * Bottleneck.expansion, planes, 1, dilation, dcn))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x)))


class ConvModule(nn.Module):
    def __init__(self, inplanes: int, planes: int, size: int, norm: bool):
        super().__init__()
        self.conv = nn.Conv2d(inplanes, planes, size, padding=size // 2, bias=not norm)
        self.bn, self.activate = nn.BatchNorm2d(planes) if norm else None, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.activate(x if self.bn is None else self.bn(x))


class PPM(nn.ModuleList):
    """Pooled, taken by a convolution without a norm (one value a channel is too few for it), resized."""

    def __init__(self, pool_scales: tuple[int, ...], inplanes: int, planes: int):
        pools = ((nn.AdaptiveAvgPool2d(size), ConvModule(inplanes, planes, 1, False)) for size in pool_scales)
        super().__init__(nn.Sequential(*each) for each in pools)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [F.interpolate(ppm(x), x.shape[2:], mode="bilinear", align_corners=False) for ppm in self]


class PSPHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.psp_modules = PPM((1, 2, 3), 28, 9)
        self.bottleneck = ConvModule(28 + 3 * 9, 16, 3, True)
        self.conv_seg = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_seg(self.bottleneck(torch.cat([x, *self.psp_modules(x)], 1)))


class EncoderDecoder(nn.Module):
    """[N, 3, H, W] -> logits [N, classes, H, W]."""

    def __init__(self):
        super().__init__()
        self.backbone, self.decode_head = ResNet(), PSPHead()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.2)
                nn.init.normal_(module.running_mean, 0, 0.2)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
            elif isinstance(module, nn.Conv2d | ModulatedDeformConv2dPack):
                nn.init.normal_(module.weight, 0, module.weight[0].numel() ** -0.5)
                if getattr(module, "bias", None) is not None:
                    nn.init.normal_(module.bias, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.decode_head(self.backbone(x))
        return F.interpolate(out, x.shape[2:], mode="bilinear", align_corners=False)


def discs() -> tuple[Tensor, Tensor]:
    """Coloured discs on a slope; their rims and what the picture does not fill are ignored."""
    y, x = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    label = torch.zeros(PICTURES, HIGH, WIDE, dtype=torch.long)
    colours = torch.tensor([[0.0, 0, 0], [2, 0, -1], [-1, 2, 0], [0, -1, 2], [1, 1, -2]])
    for each in label:
        for kind in torch.randperm(CLASSES - 1)[:3] + 1:
            distance = ((y - HIGH * torch.rand(())) ** 2 + (x - WIDE * torch.rand(())) ** 2).sqrt()
            each[distance < 4.3] = IGNORED
            each[distance < 3.7] = kind
    picture = colours[label * (label != IGNORED)].movedim(3, 1) + 0.3 * torch.randn(PICTURES, 3, HIGH, WIDE)
    picture = picture + torch.randn(PICTURES, 3, 1, 1) * (x / WIDE - 0.5)
    for i in range(1, PICTURES):
        picture[i, :, :, WIDE - i :], label[i, :, WIDE - i :] = 0, IGNORED
    return picture, label


def labelled(logits: Tensor, label: Tensor) -> Tensor:
    """A third of the cross entropy of the pixels that are not ignored."""
    return F.cross_entropy(logits, label, ignore_index=IGNORED) / 3
