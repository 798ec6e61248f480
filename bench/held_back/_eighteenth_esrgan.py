"""A small Real-ESRGAN: dense blocks within residual blocks, a spectral U-Net critic, and frozen features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEAT, GROW, BLOCKS, CRITIC, LOOKS = 8, 3, 3, 3, (6, 6, 8)
SLOPE, RESIDUAL, EPS, SHAPE = 0.2, 0.2, 1e-12, (16, 24)
TAPS, LAYER_WEIGHTS = (0, 2, 5), (0.1, 0.4, 1.0)
OUTPUTS = ("output", "fake_g_pred", "real_d_pred", "fake_d_pred")
OUTPUTS += tuple(f"{start}_{i}" for start in ("features", "gt_features") for i in TAPS)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIXEL_WEIGHT, PERCEPTUAL_WEIGHT, GAN_WEIGHT, TOTAL = 1.0, 0.5, 0.1, 0.03


class SpectralConv2d(nn.Module):
    """A convolution without bias whose weight is divided by its largest singular value."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 1):
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight_orig = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.register_buffer("weight_u", torch.empty(outputs))
        self.register_buffer("weight_v", torch.empty(inputs * kernel * kernel))

    def power_iteration(self, matrix: Tensor) -> None:
        v = F.normalize(torch.mv(matrix.t(), self.weight_u), dim=0, eps=EPS)
        u = F.normalize(torch.mv(matrix, v), dim=0, eps=EPS)
        self.weight_v.copy_(v)
        self.weight_u.copy_(u)

    def compute_weight(self) -> Tensor:
        matrix = self.weight_orig.flatten(1)
        if self.training:
            with torch.no_grad():
                self.power_iteration(matrix)
        sigma = torch.dot(self.weight_u.clone(), torch.mv(matrix, self.weight_v.clone()))
        return self.weight_orig / sigma

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.compute_weight(), stride=self.stride, padding=self.padding)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer and bias count; the power iteration has just begun."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, a=SLOPE)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, SpectralConv2d):
        nn.init.kaiming_normal_(module.weight_orig, a=SLOPE)
        nn.init.normal_(module.weight_u)
        with torch.no_grad():
            for _ in range(3):
                module.power_iteration(module.weight_orig.flatten(1))


class ResidualDenseBlock(nn.Module):
    """Each convolution reads the input and all maps before it; the last adds a part of its map."""

    def __init__(self, num_feat: int, num_grow_ch: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_feat, num_grow_ch, 3, 1, 1)
        self.conv2 = nn.Conv2d(num_feat + num_grow_ch, num_grow_ch, 3, 1, 1)
        self.conv3 = nn.Conv2d(num_feat + 2 * num_grow_ch, num_grow_ch, 3, 1, 1)
        self.conv4 = nn.Conv2d(num_feat + 3 * num_grow_ch, num_grow_ch, 3, 1, 1)
        self.conv5 = nn.Conv2d(num_feat + 4 * num_grow_ch, num_feat, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(SLOPE)

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            maps.append(self.lrelu(conv(torch.cat(maps, 1))))
        return self.conv5(torch.cat(maps, 1)) * RESIDUAL + x


class RRDB(nn.Module):
    """Three dense blocks, and a part of what they make added to what came in."""

    def __init__(self, num_feat: int, num_grow_ch: int):
        super().__init__()
        self.rdb1 = ResidualDenseBlock(num_feat, num_grow_ch)
        self.rdb2 = ResidualDenseBlock(num_feat, num_grow_ch)
        self.rdb3 = ResidualDenseBlock(num_feat, num_grow_ch)

    def forward(self, x: Tensor) -> Tensor:
        out = self.rdb3(self.rdb2(self.rdb1(x)))
        return out * RESIDUAL + x


class RRDBNet(nn.Module):
    """Images [N, 3, H, W] -> [N, 3, 2 H, 2 W]: folded to half the size, then doubled twice."""

    def __init__(self):
        super().__init__()
        self.conv_first = nn.Conv2d(4 * 3, FEAT, 3, 1, 1)
        self.body = nn.Sequential(*(RRDB(FEAT, GROW) for _ in range(BLOCKS)))
        self.conv_body = nn.Conv2d(FEAT, FEAT, 3, 1, 1)
        self.conv_up1, self.conv_up2 = nn.Conv2d(FEAT, FEAT, 3, 1, 1), nn.Conv2d(FEAT, FEAT, 3, 1, 1)
        self.conv_hr, self.conv_last = nn.Conv2d(FEAT, FEAT, 3, 1, 1), nn.Conv2d(FEAT, 3, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(SLOPE)

    def forward(self, x: Tensor) -> Tensor:
        feat = self.conv_first(F.pixel_unshuffle(x, 2))
        feat = feat + self.conv_body(self.body(feat))
        feat = self.lrelu(self.conv_up1(F.interpolate(feat, scale_factor=2, mode="nearest")))
        feat = self.lrelu(self.conv_up2(F.interpolate(feat, scale_factor=2, mode="nearest")))
        return self.conv_last(self.lrelu(self.conv_hr(feat)))


class UNetDiscriminatorSN(nn.Module):
    """A logit for each pixel: three times down, three times up with what was there added."""

    def __init__(self, n: int = CRITIC):
        super().__init__()
        self.conv0 = nn.Conv2d(3, n, 3, 1, 1)
        self.conv1 = SpectralConv2d(n, 2 * n, 4, 2)
        self.conv2 = SpectralConv2d(2 * n, 4 * n, 4, 2)
        self.conv3 = SpectralConv2d(4 * n, 8 * n, 4, 2)
        self.conv4 = SpectralConv2d(8 * n, 4 * n, 3)
        self.conv5 = SpectralConv2d(4 * n, 2 * n, 3)
        self.conv6 = SpectralConv2d(2 * n, n, 3)
        self.conv7, self.conv8 = SpectralConv2d(n, n, 3), SpectralConv2d(n, n, 3)
        self.conv9 = nn.Conv2d(n, 1, 3, 1, 1)

    def up(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    def forward(self, x: Tensor) -> Tensor:
        x0 = F.leaky_relu(self.conv0(x), SLOPE)
        x1 = F.leaky_relu(self.conv1(x0), SLOPE)
        x2 = F.leaky_relu(self.conv2(x1), SLOPE)
        x3 = F.leaky_relu(self.conv3(x2), SLOPE)
        x4 = F.leaky_relu(self.conv4(self.up(x3)), SLOPE) + x2
        x5 = F.leaky_relu(self.conv5(self.up(x4)), SLOPE) + x1
        x6 = F.leaky_relu(self.conv6(self.up(x5)), SLOPE) + x0
        out = F.leaky_relu(self.conv7(x6), SLOPE)
        out = F.leaky_relu(self.conv8(out), SLOPE)
        return self.conv9(out)


class VGGFeatureExtractor(nn.Module):
    """What the convolutions of a fixed network give of a normalised image, before activation."""

    def __init__(self):
        super().__init__()
        a, b, c = LOOKS
        first = [nn.Conv2d(3, a, 3, padding=1), nn.ReLU(), nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*first, nn.MaxPool2d(2, 2), nn.Conv2d(b, c, 3, padding=1))
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = (x - self.mean) / self.std
        found = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in TAPS:
                found.append(x)
        return found


class ESRGAN(nn.Module):
    """Low- and high-resolution images -> the large image, the critic's logits, the features of both."""

    def __init__(self):
        super().__init__()
        self.net_g, self.net_d, self.vgg = RRDBNet(), UNetDiscriminatorSN(), VGGFeatureExtractor()
        self.apply(varied)

    def forward(self, lq: Tensor, gt: Tensor) -> dict[str, Tensor]:
        output = self.net_g(lq)
        logits = [self.net_d(image) for image in (output, gt, output.detach())]
        features, gt_features = self.vgg(output), self.vgg(gt.detach())
        return dict(zip(OUTPUTS, (output, *logits, *features, *gt_features), strict=True))


def degraded() -> tuple[dict[str, Tensor], Tensor]:
    """Pictures of smooth regions and stripes, and what is left of them at half the size under noise."""
    field = F.interpolate(torch.randn(2, 3, 4, 6), SHAPE, mode="bicubic", align_corners=True)
    stripes = torch.sin(0.9 * torch.arange(SHAPE[1]) + 3 * torch.rand(2, 1, SHAPE[0], 1))
    gt = (0.5 + 0.25 * field + 0.1 * stripes * (field > 0)).clamp(0, 1)
    lq = F.avg_pool2d(gt, 2) + 0.03 * torch.randn(2, 3, SHAPE[0] // 2, SHAPE[1] // 2)
    return {"lq": lq, "gt": gt}, gt.clone()


def believed(logits: Tensor, real: bool) -> Tensor:
    """How far the logits are from those of true images, or of made ones."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def both_parts(outputs: dict[str, Tensor], gt: Tensor) -> Tensor:
    """The generator's losses, of pixels, features and the critic, and the critic's own."""
    perceptual = sum(
        weight * F.l1_loss(outputs[f"features_{i}"], outputs[f"gt_features_{i}"])
        for i, weight in zip(TAPS, LAYER_WEIGHTS, strict=True)
    )
    l_g = PIXEL_WEIGHT * F.l1_loss(outputs["output"], gt.to(outputs["output"]))
    l_g = l_g + PERCEPTUAL_WEIGHT * perceptual + GAN_WEIGHT * believed(outputs["fake_g_pred"], True)
    l_d = believed(outputs["real_d_pred"], True) + believed(outputs["fake_d_pred"], False)
    return TOTAL * (l_g + l_d)
