"""A small R(2+1)D: factorised video convolutions in basic blocks, with non-local blocks between."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, FRAMES, HIGH, WIDE = 3, 6, 10, 14
VIDEOS, CLIPS, CLASSES = 4, 2, 5


class Conv2Plus1D(nn.Sequential):
    def __init__(self, in_planes: int, out_planes: int, midplanes: int, stride: int = 1, padding: int = 1):
        space = {"stride": (1, stride, stride), "padding": (0, padding, padding)}
        time = {"stride": (stride, 1, 1), "padding": (padding, 0, 0)}
        super().__init__(
            nn.Conv3d(in_planes, midplanes, (1, 3, 3), bias=False, **space),
            nn.BatchNorm3d(midplanes),
            nn.ReLU(),
            nn.Conv3d(midplanes, out_planes, (3, 1, 1), bias=False, **time),
        )


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None):
        super().__init__()
        midplanes = (inplanes * planes * 3 * 3 * 3) // (inplanes * 3 * 3 + 3 * planes)
        first, second = (
            Conv2Plus1D(inplanes, planes, midplanes, stride),
            Conv2Plus1D(planes, planes, midplanes),
        )
        self.conv1 = nn.Sequential(first, nn.BatchNorm3d(planes), nn.ReLU())
        self.conv2 = nn.Sequential(second, nn.BatchNorm3d(planes))
        self.relu = nn.ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        out = self.conv2(self.conv1(x))
        return self.relu(out + residual)


class R2Plus1dStem(nn.Sequential):
    def __init__(self, midplanes: int, planes: int):
        super().__init__(
            nn.Conv3d(COLOURS, midplanes, (1, 7, 7), stride=(1, 2, 2), padding=(0, 3, 3), bias=False),
            nn.BatchNorm3d(midplanes),
            nn.ReLU(),
            nn.Conv3d(midplanes, planes, (3, 1, 1), padding=(1, 0, 0), bias=False),
            nn.BatchNorm3d(planes),
            nn.ReLU(),
        )


class NonLocalBlock(nn.Module):
    """The embedded gaussian; no biases where the softmax over keys or the norm would undo them."""

    def __init__(self, in_channels: int, inter_channels: int):
        super().__init__()
        self.g = nn.Sequential(nn.Conv3d(in_channels, inter_channels, 1, bias=False), nn.MaxPool3d((1, 2, 2)))
        self.theta = nn.Conv3d(in_channels, inter_channels, 1)
        self.phi = nn.Sequential(
            nn.Conv3d(in_channels, inter_channels, 1, bias=False), nn.MaxPool3d((1, 2, 2))
        )
        self.W = nn.Sequential(
            nn.Conv3d(inter_channels, in_channels, 1, bias=False), nn.BatchNorm3d(in_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        g_x = self.g(x).flatten(2).transpose(1, 2)
        theta_x = self.theta(x).flatten(2).transpose(1, 2)
        phi_x = self.phi(x).flatten(2)
        f = torch.softmax(theta_x @ phi_x, dim=-1)
        y = (f @ g_x).transpose(1, 2).unflatten(2, x.shape[2:])
        return self.W(y) + x


class VideoResNet(nn.Module):
    """Clips [N, K, C, T, H, W] -> logits: their mean in training, the clips' mean probability's log after."""

    def __init__(self):
        super().__init__()
        self.inplanes = 8
        self.stem = R2Plus1dStem(7, self.inplanes)
        self.layer1 = self._make_layer(8, 2)
        self.nonlocal1 = NonLocalBlock(8, 5)
        self.layer2 = self._make_layer(12, 2, stride=2)
        self.nonlocal2 = NonLocalBlock(12, 6)
        self.layer3 = self._make_layer(18, 1, stride=2)
        self.avgpool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.fc = nn.Linear(18, CLASSES)
        self._initialize_weights()

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes:
            shortcut = nn.Conv3d(self.inplanes, planes, 1, stride=(stride,) * 3, bias=False)
            downsample = nn.Sequential(shortcut, nn.BatchNorm3d(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        layers.extend(BasicBlock(planes, planes) for _ in range(1, blocks))
        return nn.Sequential(*layers)

    def _initialize_weights(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Conv3d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
                if m.bias is not None:
                    nn.init.normal_(m.bias, 0, 0.3)
            elif isinstance(m, nn.BatchNorm3d):
                nn.init.uniform_(m.weight, 0.6, 1.2)
                nn.init.normal_(m.bias, 0, 0.2)
                nn.init.normal_(m.running_mean, 0, 0.1)
                nn.init.uniform_(m.running_var, 0.7, 1.4)
            elif isinstance(m, NonLocalBlock):
                for weight in (m.theta.weight, m.phi[0].weight):
                    nn.init.normal_(weight, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        clips = x.shape[1]
        x = self.stem(x.flatten(0, 1))
        x = self.nonlocal1(self.layer1(x))
        x = self.nonlocal2(self.layer2(x))
        x = self.avgpool(self.layer3(x))
        logits = self.fc(x.flatten(1)).unflatten(0, (-1, clips))
        if self.training:
            return logits.mean(1)
        return torch.softmax(logits, dim=-1).mean(1).log()


def drifting() -> tuple[Tensor, Tensor]:
    """Two clips each of a coloured blob that drifts over a grating; the class is where it goes."""
    label = torch.randint(CLASSES, (VIDEOS,))
    shape = VIDEOS, CLIPS, 1, 1, 1, 1
    turn = (math.tau * label / CLASSES).view(VIDEOS, 1, 1, 1, 1, 1)
    time = torch.arange(FRAMES)[:, None, None] - FRAMES / 2
    down, across = torch.arange(HIGH)[:, None] - HIGH / 2, torch.arange(WIDE) - WIDE / 2
    speed, tone = 0.6 + 0.4 * torch.rand(shape), torch.rand(VIDEOS, 1, COLOURS, 1, 1, 1)
    far = (down - speed * turn.sin() * time + torch.randn(shape)) ** 2
    far = far + (across - speed * turn.cos() * time + torch.randn(shape)) ** 2
    grating = torch.sin(across / 2 + down / 3 + math.tau * torch.rand(shape))
    x = 2 * tone * torch.exp(-far / 6) + 0.4 * (1 - tone) * grating
    return x + 0.05 * torch.randn_like(x), label


def third_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """A third of the cross entropy."""
    return F.cross_entropy(logits, label) / 3
