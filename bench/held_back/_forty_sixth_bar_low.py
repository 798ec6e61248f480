"""Twin networks on local embeddings: Barlow Twins, VICReg, SimSiam and NT-Xent over one encoder."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PICTURES, CLASSES = 8, 12, 5, 4
STEM, WIDTH, HIDDEN, MIDDLE, SIZE = 12, 20, 40, 36, 24


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2, self.downsample = nn.BatchNorm2d(planes), None
        if stride != 1:
            shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


class ResNet(nn.Module):
    """[N, 3, H, W] -> [N P, D]: a row for each of the P regions of a picture."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, STEM, 3, padding=1, bias=False), nn.BatchNorm2d(STEM)
        self.relu, self.avgpool = nn.ReLU(), nn.AvgPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(STEM, STEM))
        self.layer2 = nn.Sequential(BasicBlock(STEM, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return x.flatten(2).transpose(1, 2).flatten(0, 1)


def mlp(*sizes: int, last_bias: bool = False) -> nn.Sequential:
    layers = []
    for one, two in pairwise(sizes[:-1]):
        layers += [nn.Linear(one, two, bias=False), nn.BatchNorm1d(two), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:], bias=last_bias))


def off_diagonal(x: Tensor) -> Tensor:
    return x[~torch.eye(len(x), dtype=torch.bool)]


class BarlowTwinsLoss(nn.Module):
    def __init__(self, lambd: float = 0.02):
        super().__init__()
        self.bn, self.lambd = nn.BatchNorm1d(SIZE, affine=False), lambd

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        c = self.bn(z1).T @ self.bn(z2) / len(z1)
        on_diag = (torch.diagonal(c) - 1).pow(2).sum()
        return on_diag + self.lambd * off_diagonal(c).pow(2).sum()


class VICRegLoss(nn.Module):
    def __init__(self, sim_coeff: float = 25.0, std_coeff: float = 25.0, cov_coeff: float = 1.0):
        super().__init__()
        self.sim_coeff, self.std_coeff, self.cov_coeff = sim_coeff, std_coeff, cov_coeff

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        repr_loss, std_loss, cov_loss = F.mse_loss(x, y), 0, 0
        for z in (x, y):
            z = z - z.mean(dim=0)
            std_loss = std_loss + F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean() / 2
            cov_loss = cov_loss + off_diagonal(z.T @ z / (len(z) - 1)).pow(2).sum() / SIZE
        return self.sim_coeff * repr_loss + self.std_coeff * std_loss + self.cov_coeff * cov_loss


class SimSiamLoss(nn.Module):
    def forward(self, p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        one, two = F.cosine_similarity(p1, z2.detach()), F.cosine_similarity(p2, z1.detach())
        return -(one.mean() + two.mean()) * 0.5


class NTXentLoss(nn.Module):
    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.temperature = temperature

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        z, n = F.normalize(torch.cat([z1, z2])), len(z1)
        sim = (z @ z.T / self.temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(sim, torch.arange(2 * n).roll(n))


class TwinNetworks(nn.Module):
    """Two views -> the embedding of the first, the four losses, and the logits of a probe."""

    def __init__(self):
        super().__init__()
        self.backbone, self.projector = ResNet(), mlp(WIDTH, HIDDEN, MIDDLE, SIZE)
        self.predictor = mlp(SIZE, 10, SIZE, last_bias=True)
        self.barlow, self.vicreg, self.simsiam = BarlowTwinsLoss(), VICRegLoss(), SimSiamLoss()
        self.ntxent, self.classifier = NTXentLoss(), nn.Linear(WIDTH, CLASSES)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=1.2 / math.sqrt(module.weight[0].numel()))
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=0.1)
            elif isinstance(module, (nn.BatchNorm2d, nn.BatchNorm1d)):
                nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.7, 1.4)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.7, 1.3), nn.init.normal_(module.bias, std=0.2)

    def forward(self, view1: Tensor, view2: Tensor) -> dict[str, Tensor]:
        h1, h2 = self.backbone(view1), self.backbone(view2)
        z1, z2 = self.projector(h1), self.projector(h2)
        return {
            "embedding": z1,
            "barlow": self.barlow(z1, z2),
            "vicreg": self.vicreg(z1, z2),
            "simsiam": self.simsiam(self.predictor(z1), self.predictor(z2), z1, z2),
            "ntxent": self.ntxent(z1, z2),
            "logits": self.classifier(h1.detach().unflatten(0, (len(view1), -1)).mean(1)),
        }


def two_views() -> tuple[dict[str, Tensor], Tensor]:
    """Waves by class, twice: each view has its own brightness, contrast and noise."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    views = []
    for _ in range(2):
        contrast, bright = 0.7 + 0.6 * torch.rand(PICTURES, 1, 1, 1), 0.3 * torch.randn(PICTURES, 3, 1, 1)
        views.append(wave * contrast + bright + 0.2 * torch.randn_like(wave))
    return {"view1": views[0], "view2": views[1]}, label


def joint_loss(outputs: dict[str, Tensor], label: Tensor) -> Tensor:
    """The four losses, each about as large as the others, and that of the probe, by eight."""
    total = outputs["barlow"] / SIZE + outputs["vicreg"] / 25 + outputs["simsiam"]
    return (total + outputs["ntxent"] / 4 + F.cross_entropy(outputs["logits"], label)) / 8
