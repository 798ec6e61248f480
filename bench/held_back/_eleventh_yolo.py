"""A one-stage detector of three levels: cross-stage blocks, a two-way neck, binned distances."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BINS, CLASSES, STRIDES, HEIGHT, WIDTH, IMAGES = 4, 3, (4, 8, 16), 64, 48, 4


def make_anchors(shapes: list[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """The middles (x, y) of all cells [2, A], counted in cells, and their strides [1, A]."""
    points, strides = [], []
    for (high, wide), stride in zip(shapes, STRIDES, strict=True):
        rows, columns = (torch.arange(n, dtype=like.dtype, device=like.device) + 0.5 for n in (high, wide))
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        points.append(torch.stack([x, y]).flatten(1))
        strides.append(like.new_full((1, high * wide), stride))
    return torch.cat(points, 1), torch.cat(strides, 1)


def dist2bbox(distance: Tensor, anchors: Tensor) -> Tensor:
    """Distances to the left, top, right and bottom [N, 4, A] as middle, width and height."""
    before, behind = distance.chunk(2, 1)
    low, high = anchors - before, anchors + behind
    return torch.cat([(low + high) / 2, high - low], 1)


class Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int, shortcut: bool):
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 3), Conv(c, c, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C2f(nn.Module):
    """Both halves of a first convolution and all that the bottlenecks make of the second one, joined."""

    def __init__(self, c1: int, c2: int, n: int = 1, shortcut: bool = False):
        super().__init__()
        self.c = c2 // 2
        self.cv1, self.cv2 = Conv(c1, 2 * self.c), Conv((2 + n) * self.c, c2)
        self.m = nn.ModuleList(Bottleneck(self.c, shortcut) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        for m in self.m:
            y.append(m(y[-1]))
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    """Three max pools, each of the one before."""

    def __init__(self, c1: int, c2: int, k: int):
        super().__init__()
        self.cv1, self.cv2 = Conv(c1, c1 // 2), Conv(4 * (c1 // 2), c2)
        self.m = nn.MaxPool2d(k, 1, k // 2)

    def forward(self, x: Tensor) -> Tensor:
        y = [self.cv1(x)]
        for _ in range(3):
            y.append(self.m(y[-1]))
        return self.cv2(torch.cat(y, 1))


class Concat(nn.Module):
    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.cat(x, 1)


class DFL(nn.Module):
    """The expected distance of each side from the logits of its bins [N, 4 * bins, A]."""

    def __init__(self, c1: int):
        super().__init__()
        self.c1, self.conv = c1, nn.Conv2d(c1, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(c1).view(1, c1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        shares = x.view(len(x), 4, self.c1, -1).transpose(1, 2).softmax(1)
        return self.conv(shares)[:, 0]


class Detect(nn.Module):
    """Boxes and scores, of all levels in one row: logits in training, else in pixels and from 0 to 1."""

    def __init__(self, channels: tuple[int, ...], c: int = 8):
        super().__init__()
        self.cv2, self.cv3, self.dfl = nn.ModuleList(), nn.ModuleList(), DFL(BINS)
        for c1, stride in zip(channels, STRIDES, strict=True):
            few = math.log(5 / CLASSES / (HEIGHT / stride) ** 2)
            for branches, out, mean in (self.cv2, 4 * BINS, 1.0), (self.cv3, CLASSES, few):
                branches.append(nn.Sequential(Conv(c1, c, 3), Conv(c, c, 3), nn.Conv2d(c, out, 1)))
                nn.init.normal_(branches[-1][2].bias, mean, 0.4)

    def forward(self, feats: list[Tensor]) -> dict[str, Tensor]:
        boxes = torch.cat([cv(x).flatten(2) for cv, x in zip(self.cv2, feats, strict=True)], 2)
        scores = torch.cat([cv(x).flatten(2) for cv, x in zip(self.cv3, feats, strict=True)], 2)
        if self.training:
            return {"boxes": boxes, "scores": scores}
        anchors, strides = make_anchors([x.shape[2:] for x in feats], boxes)
        return {"boxes": dist2bbox(self.dfl(boxes), anchors) * strides, "scores": scores.sigmoid()}


def settle(module: nn.Module) -> None:
    """Norms as after some training, and convolutions that keep the size of what they get."""
    if isinstance(module, Conv):
        nn.init.kaiming_normal_(module.conv.weight)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.7, 1.4)
        nn.init.normal_(module.bias, 0.0, 0.3)
        module.running_mean.normal_(0.0, 0.1)
        module.running_var.uniform_(0.5, 1.5)


class DetectionModel(nn.Module):
    """Images [N, 3, H, W]; each layer takes what the layers ``f`` gave."""

    def __init__(self):
        super().__init__()
        layers = [
            (-1, Conv(3, 8, 3, 2)),
            (-1, Conv(8, 8, 3, 2)),
            (-1, C2f(8, 8, 1, True)),
            (-1, Conv(8, 8, 3, 2)),
            (-1, C2f(8, 8, 2, True)),
            (-1, Conv(8, 12, 3, 2)),
            (-1, C2f(12, 12, 1, True)),
            (-1, SPPF(12, 12, 3)),
            (-1, nn.Upsample(scale_factor=2.0, mode="nearest")),
            ((-1, 4), Concat()),
            (-1, C2f(20, 8)),
            (-1, nn.Upsample(scale_factor=2.0, mode="nearest")),
            ((-1, 2), Concat()),
            (-1, C2f(16, 8)),
            (-1, Conv(8, 8, 3, 2)),
            ((-1, 10), Concat()),
            (-1, C2f(16, 8)),
            (-1, Conv(8, 8, 3, 2)),
            ((-1, 7), Concat()),
            (-1, C2f(20, 12)),
            ((13, 16, 19), Detect((8, 8, 12))),
        ]
        self.model = nn.Sequential(*(layer for _, layer in layers))
        for f, layer in layers:
            layer.f = f
        self.apply(settle)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = []
        for layer in self.model:
            x = layer(x if layer.f == -1 else [x if j == -1 else y[j] for j in layer.f])
            y.append(x)
        return x


def rectangles() -> tuple[Tensor, Tensor]:
    """Coloured rectangles in noise; their sides' distances from each anchor and their kinds [N, 4 + 3, A]."""
    full = torch.tensor([WIDTH, HEIGHT])
    kind = F.one_hot(torch.randint(CLASSES, (IMAGES,)), CLASSES)
    extent = 14 + torch.rand(IMAGES, 2) * (full - 28)
    low = torch.rand(IMAGES, 2) * (full - extent)
    high = low + extent
    x, y = torch.arange(WIDTH) + 0.5, torch.arange(HEIGHT) + 0.5
    across, down = (x > low[:, :1]) & (x < high[:, :1]), (y > low[:, 1:]) & (y < high[:, 1:])
    shape = (down[:, :, None] & across[:, None])[:, None]
    images = 0.4 * torch.randn(IMAGES, 3, HEIGHT, WIDTH) + 1.5 * kind[:, :, None, None] * shape
    points, strides = make_anchors([(HEIGHT // s, WIDTH // s) for s in STRIDES], images)
    sides = torch.cat([points * strides - low[..., None], high[..., None] - points * strides], 1) / strides
    inside = sides.amin(1, keepdim=True) > 0
    return images, torch.cat([sides.clamp(0, BINS - 1.01), kind[..., None] * inside], 1)


def focal(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The cross-entropy of the two bins next to each side's distance, and that of the kinds."""
    sides, kinds = target.to(outputs["scores"]).split((4, CLASSES), 1)
    inside, low = kinds.sum(1), sides.floor()
    logs = outputs["boxes"].unflatten(1, (4, BINS)).log_softmax(2)
    below, above = (logs.gather(2, bins.long()[:, :, None])[:, :, 0] for bins in (low, low + 1))
    found = ((low + 1 - sides) * below + (sides - low) * above).mean(1)
    scores = F.binary_cross_entropy_with_logits(outputs["scores"], kinds, reduction="sum")
    return (scores - (found * inside).sum()) / inside.numel()
