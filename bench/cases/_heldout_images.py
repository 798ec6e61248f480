"""More networks for images: a U-Net, a frozen backbone, frozen statistics, a generator, a Siamese network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class UNet(nn.Module):
    """[N, 1, 12, 12] -> [N, 3, 12, 12]: one step down, one bilinear step up, joined by a skip connection."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.down2 = nn.Conv2d(6, 10, 3, padding=1)
        self.middle = nn.Conv2d(10, 10, 3, padding=1)
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.join = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 3, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        skip = self.act(self.down1(x))
        low = self.act(self.middle(self.act(self.down2(self.pool(skip)))))
        return self.head(self.act(self.join(torch.cat([self.upsample(low), skip], 1))))


def _with_statistics(bn: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """``bn`` as if it had been trained before."""
    bn.running_mean.normal_(0, 0.3)
    bn.running_var.uniform_(0.5, 2)
    nn.init.uniform_(bn.weight, 0.5, 1.5)
    nn.init.normal_(bn.bias, 0, 0.3)
    return bn


class Transfer(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: a frozen backbone in eval mode, and a head that is trained."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            _with_statistics(nn.BatchNorm2d(8)),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            _with_statistics(nn.BatchNorm2d(16)),
            nn.ReLU(),
        )
        self.backbone.requires_grad_(False)
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 4)

    def train(self, mode: bool = True) -> Transfer:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(self.backbone(x).mean((2, 3)))))


class FineTuned(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: every weight is trained, BatchNorm's statistics stay as they were loaded."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = _with_statistics(nn.BatchNorm2d(8))
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.bn2 = _with_statistics(nn.BatchNorm2d(12))
        self.act = nn.ReLU()
        self.fc = nn.Linear(12, 4)

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        return self.fc(self.act(self.bn2(self.conv2(x))).mean((2, 3)))


class Generator(nn.Module):
    """Latent [N, 10] -> images [N, 1, 16, 16]."""

    def __init__(self):
        super().__init__()
        self.start = nn.ConvTranspose2d(10, 12, 4, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.up1 = nn.ConvTranspose2d(12, 8, 4, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.up2 = nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.start(z[:, :, None, None])))
        x = F.relu(self.bn2(self.up1(x)))
        return torch.tanh(self.up2(x))


class Encoder(nn.Module):
    """[N, 1, 12, 12] -> unit vectors [N, 8]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.act1 = nn.PReLU(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.act2 = nn.PReLU(8)
        self.fc = nn.Linear(8 * 6 * 6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.conv2(self.act1(self.conv1(x))))
        return F.normalize(self.fc(x.flatten(1)), dim=1)


class Siamese(nn.Module):
    """Two images -> the distance of their vectors, [N]."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(left), self.encoder(right))


def _contrastive(distance: Tensor, same: Tensor) -> Tensor:
    same = same.to(distance.dtype)
    return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()


def _pair() -> tuple[tuple[Tensor, Tensor], Tensor]:
    left, same = torch.randn(10, 1, 12, 12), torch.randint(2, (10,))
    near = left + 0.5 * torch.randn_like(left)
    right = torch.where(same[:, None, None, None] == 1, near, torch.randn_like(left))
    return (left, right), same


unet = _task("unet", UNet, lambda: (torch.randn(6, 1, 12, 12), torch.randint(3, (6, 12, 12))))
transfer = _task("transfer", Transfer, lambda: (torch.randn(12, 3, 12, 12), _classes(12, 4)))
fine_tuned = _task("fine_tuned", FineTuned, lambda: (torch.randn(12, 3, 12, 12), _classes(12, 4)))
generator = _task(
    "generator", Generator, lambda: (torch.randn(10, 10), torch.tanh(torch.randn(10, 1, 16, 16))), F.mse_loss
)
siamese = _task("siamese", Siamese, _pair, _contrastive)
