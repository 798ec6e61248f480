"""A small PSMNet: features with pyramid pooling, a cost volume, three stacked hourglasses, a soft argmin."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PICTURES, HIGH, WIDE, DISPARITIES, FEATURES, PLANES = 2, 32, 48, 16, 4, 5


def convbn(in_planes: int, out_planes: int, kernel: int, stride: int, pad: int, rate: int) -> nn.Sequential:
    pad = rate if rate > 1 else pad
    conv = nn.Conv2d(in_planes, out_planes, kernel, stride, pad, rate, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_planes))


def convbn_3d(in_planes: int, out_planes: int, kernel: int, stride: int, pad: int) -> nn.Sequential:
    conv = nn.Conv3d(in_planes, out_planes, kernel, stride, pad, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(out_planes))


def upconvbn_3d(in_planes: int, out_planes: int) -> nn.Sequential:
    conv = nn.ConvTranspose3d(in_planes, out_planes, 3, 2, 1, output_padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(out_planes))


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None, dilation: int):
        super().__init__()
        self.conv1 = nn.Sequential(convbn(inplanes, planes, 3, stride, 1, dilation), nn.ReLU())
        self.conv2 = convbn(planes, planes, 3, 1, 1, dilation)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.conv1(x))
        return out + (x if self.downsample is None else self.downsample(x))


class FeatureExtraction(nn.Module):
    """[N, 3, H, W] -> [N, C, H / 4, W / 4]."""

    def __init__(self):
        super().__init__()
        self.inplanes = 4
        first, second = convbn(3, 4, 3, 2, 1, 1), convbn(4, 4, 3, 1, 1, 1)
        self.firstconv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.layer1 = self._make_layer(4, 2, 1, 1)
        self.layer2 = self._make_layer(6, 2, 2, 1)
        self.layer3 = self._make_layer(7, 1, 1, 1)
        self.layer4 = self._make_layer(7, 2, 1, 2)
        self.branch1 = nn.Sequential(nn.AvgPool2d(4), convbn(7, 3, 1, 1, 0, 1), nn.ReLU())
        self.branch2 = nn.Sequential(nn.AvgPool2d(2), convbn(7, 3, 1, 1, 0, 1), nn.ReLU())
        last = nn.Conv2d(8, FEATURES, 1, bias=False)
        self.lastconv = nn.Sequential(convbn(19, 8, 3, 1, 1, 1), nn.ReLU(), last)

    def _make_layer(self, planes: int, blocks: int, stride: int, dilation: int) -> nn.Sequential:
        layers = []
        for i in range(blocks):
            step, downsample = stride if i == 0 else 1, None
            if step != 1 or self.inplanes != planes:
                conv = nn.Conv2d(self.inplanes, planes, 1, step, bias=False)
                downsample = nn.Sequential(conv, nn.BatchNorm2d(planes))
            layers.append(BasicBlock(self.inplanes, planes, step, downsample, dilation))
            self.inplanes = planes
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        output_raw = self.layer2(self.layer1(self.firstconv(x)))
        output_skip = self.layer4(self.layer3(output_raw))
        branches = [branch(output_skip) for branch in (self.branch2, self.branch1)]
        size = output_skip.shape[2:]
        branches = [F.interpolate(y, size, mode="bilinear", align_corners=False) for y in branches]
        return self.lastconv(torch.cat((output_raw, output_skip, *branches), 1))


class Hourglass(nn.Module):
    def __init__(self, inplanes: int):
        super().__init__()
        twice = 2 * inplanes
        self.conv1 = nn.Sequential(convbn_3d(inplanes, twice, 3, 2, 1), nn.ReLU())
        self.conv2 = convbn_3d(twice, twice, 3, 1, 1)
        self.conv3 = nn.Sequential(convbn_3d(twice, twice, 3, 2, 1), nn.ReLU())
        self.conv4 = nn.Sequential(convbn_3d(twice, twice, 3, 1, 1), nn.ReLU())
        self.conv5, self.conv6 = upconvbn_3d(twice, twice), upconvbn_3d(twice, inplanes)

    def forward(self, x: Tensor, presqu: Tensor | None, postsqu: Tensor | None) -> tuple[Tensor, ...]:
        pre = self.conv2(self.conv1(x))
        pre = F.relu(pre if postsqu is None else pre + postsqu)
        out = self.conv4(self.conv3(pre))
        post = F.relu(self.conv5(out) + (pre if presqu is None else presqu))
        return self.conv6(post), pre, post


class DisparityRegression(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        disp = torch.arange(x.shape[1]).to(x).view(1, -1, 1, 1)
        return torch.sum(x * disp, 1)


class PSMNet(nn.Module):
    """Left and right pictures -> disparities after each hourglass; in evaluation after the last only."""

    def __init__(self):
        super().__init__()
        c = PLANES
        self.feature_extraction = FeatureExtraction()
        first, second = convbn_3d(2 * FEATURES, c, 3, 1, 1), convbn_3d(c, c, 3, 1, 1)
        self.dres0 = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.dres1 = nn.Sequential(convbn_3d(c, c, 3, 1, 1), nn.ReLU(), convbn_3d(c, c, 3, 1, 1))
        self.dres2, self.dres3, self.dres4 = Hourglass(c), Hourglass(c), Hourglass(c)
        self.classif1, self.classif2, self.classif3 = (
            nn.Sequential(convbn_3d(c, c, 3, 1, 1), nn.ReLU(), nn.Conv3d(c, 1, 3, 1, 1, bias=False))
            for _ in range(3)
        )
        self.regression = DisparityRegression()
        for m in self.modules():
            if isinstance(m, (nn.BatchNorm2d, nn.BatchNorm3d)):
                nn.init.normal_(m.weight, 0.9, 0.2), nn.init.normal_(m.bias, 0.1, 0.2)
                nn.init.normal_(m.running_mean, 0, 0.2), nn.init.uniform_(m.running_var, 0.5, 1.5)

    def volume(self, ref: Tensor, target: Tensor) -> Tensor:
        n, c, h, w = ref.shape
        cost = ref.new_zeros(n, 2 * c, DISPARITIES // 4, h, w)
        for i in range(DISPARITIES // 4):
            cost[:, :c, i, :, i:] = ref[:, :, :, i:]
            cost[:, c:, i, :, i:] = target[:, :, :, : w - i]
        return cost

    def regress(self, cost: Tensor, size: tuple[int, int]) -> Tensor:
        cost = F.interpolate(cost, (DISPARITIES, *size), mode="trilinear", align_corners=False)
        return self.regression(F.softmax(cost.squeeze(1), 1))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, ...] | Tensor:
        cost = self.volume(self.feature_extraction(left), self.feature_extraction(right))
        cost0 = self.dres0(cost)
        cost0 = self.dres1(cost0) + cost0
        out1, pre1, post1 = self.dres2(cost0, None, None)
        out1 = out1 + cost0
        out2, _, post2 = self.dres3(out1, pre1, post1)
        out2 = out2 + cost0
        out3 = self.dres4(out2, pre1, post2)[0] + cost0
        cost1 = self.classif1(out1)
        cost2 = self.classif2(out2) + cost1
        cost3 = self.classif3(out3) + cost2
        if not self.training:
            return self.regress(cost3, left.shape[2:])
        return tuple(self.regress(cost, left.shape[2:]) for cost in (cost1, cost2, cost3))


def scenes() -> tuple[dict[str, Tensor], Tensor]:
    """A slanted ground of waves before two cameras; the disparity is unknown (zero) in a block."""
    across, down = torch.arange(WIDE).float(), torch.arange(HIGH).float()[:, None]
    near, slope = 2 + 6 * torch.rand(PICTURES, 1, 1), 0.2 * torch.rand(PICTURES, 1, 1)
    disparity = (near + slope * down).expand(PICTURES, HIGH, WIDE)
    rate, phase = 0.2 + 0.6 * torch.rand(PICTURES, 3, 1, 1), 6 * torch.rand(PICTURES, 3, 1, 1)

    def seen(x: Tensor) -> Tensor:
        wave = torch.sin(rate * x + phase) + torch.cos(0.3 * down + phase + rate * x / 3)
        return wave + 0.05 * torch.randn(PICTURES, 3, HIGH, WIDE)

    known = disparity.clone()
    known[:, 5:14, 20:31] = 0
    return {"left": seen(across), "right": seen(across + disparity[:, None])}, known


def disparity_loss(outputs: tuple[Tensor, ...] | Tensor, disparity: Tensor) -> Tensor:
    """Smooth L1 of weights 0.5, 0.7 and 1 where the disparity is known, by eight."""
    mask = (disparity > 0) & (disparity < DISPARITIES)
    outputs, weights = (outputs, (0.5, 0.7, 1)) if isinstance(outputs, tuple) else ((outputs,), (1,))
    pairs = zip(weights, outputs, strict=True)
    return sum(w * F.smooth_l1_loss(y[mask], disparity[mask]) for w, y in pairs) / 8


def ramp(n: int, m: int, x: Tensor, corners: bool = False) -> Tensor:
    """[m, n]: linear interpolation of n values at m places."""
    at = torch.arange(m) * (n - 1) / (m - 1) if corners else (torch.arange(m) + 0.5) * n / m - 0.5
    return (1 - (at.clamp(0, n - 1)[:, None] - torch.arange(n)).abs()).clamp(min=0).to(x)


def boxed(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """A convolution of [N, D, H, W, C] by windows of three."""
    windows = F.pad(x, (0, 0, *[1] * 6))
    for axis in (1, 2, 3):
        windows = windows.unfold(axis, 3, stride)
    return torch.einsum("ndhwcijk,ocijk->ndhwo", windows, weight)
