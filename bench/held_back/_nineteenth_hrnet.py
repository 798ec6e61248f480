"""A small high-resolution network for human pose: three resolutions that keep exchanging their maps."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, STEM, PLANES, JOINTS = (4, 8, 12), 8, 4, 5
SHAPE, MAP = (64, 48), (16, 12)
BN_MOMENTUM, SHARPNESS = 0.1, 4.0


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, momentum=BN_MOMENTUM)


def varied(module: nn.Module) -> None:
    """Start with weights and averages that let every layer, gain and shift count."""
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.3)
        nn.init.uniform_(module.running_var, 0.6, 1.4)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, planes: int):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, planes), norm(planes)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = conv3x3(planes, planes), norm(planes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Bottleneck(nn.Module):
    """Squeeze, convolve, widen; the way around is projected where the width changes."""

    expansion = 4

    def __init__(self, inputs: int, planes: int):
        super().__init__()
        outputs = planes * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 1, bias=False), norm(planes)
        self.conv2, self.bn2 = conv3x3(planes, planes), norm(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, outputs, 1, bias=False), norm(outputs)
        self.relu = nn.ReLU()
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class HighResolutionModule(nn.Module):
    """A row of blocks for each resolution, then each resolution takes in all the others."""

    def __init__(self, widths: tuple[int, ...], blocks: int = 1):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(BasicBlock(width, width) for _ in range(blocks))) for width in widths
        )
        self.fuse_layers = nn.ModuleList(
            nn.ModuleList(self.way(widths, j, i) for j in range(len(widths))) for i in range(len(widths))
        )
        self.relu = nn.ReLU()

    @staticmethod
    def way(widths: tuple[int, ...], source: int, goal: int) -> nn.Module | None:
        """What brings the maps of one resolution to another."""
        given, wanted = widths[source], widths[goal]
        if source > goal:
            rise = nn.Upsample(scale_factor=2 ** (source - goal), mode="nearest")
            return nn.Sequential(nn.Conv2d(given, wanted, 1, bias=False), norm(wanted), rise)
        if source == goal:
            return None
        count = goal - source - 1
        links = [nn.Sequential(conv3x3(given, given, 2), norm(given), nn.ReLU()) for _ in range(count)]
        return nn.Sequential(*links, nn.Sequential(conv3x3(given, wanted, 2), norm(wanted)))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [branch(x) for branch, x in zip(self.branches, maps, strict=True)]
        fused = []
        for row in self.fuse_layers:
            y = 0
            for way, x in zip(row, maps, strict=True):
                y = y + (x if way is None else way(x))
            fused.append(self.relu(y))
        return fused


class SoftArgmax(nn.Module):
    """Heatmaps [N, J, H, W] -> expected x and y [N, J, 2] of a cell, whose centres lie within -1 and 1."""

    @staticmethod
    def centres(count: int, like: Tensor) -> Tensor:
        return (2 * torch.arange(count).to(like) + 1) / count - 1

    def forward(self, heatmaps: Tensor) -> Tensor:
        rows, columns = heatmaps.shape[2:]
        share = (SHARPNESS * heatmaps.flatten(2)).softmax(2).unflatten(2, (rows, columns))
        x = (share.sum(2) * self.centres(columns, share)).sum(2)
        y = (share.sum(3) * self.centres(rows, share)).sum(2)
        return torch.stack([x, y], 2)


class PoseHighResolutionNet(nn.Module):
    """Images [N, 3, H, W] -> heatmaps and coordinates of the joints, and the maps of all resolutions."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(3, STEM, 2), norm(STEM)
        self.conv2, self.bn2 = conv3x3(STEM, STEM, 2), norm(STEM)
        self.relu = nn.ReLU()
        wide = PLANES * Bottleneck.expansion
        self.layer1 = nn.Sequential(Bottleneck(STEM, PLANES), Bottleneck(wide, PLANES))
        self.transition1 = self.transition((wide,), WIDTHS[:2])
        self.stage2 = nn.Sequential(HighResolutionModule(WIDTHS[:2]))
        self.transition2 = self.transition(WIDTHS[:2], WIDTHS)
        self.stage3 = nn.Sequential(HighResolutionModule(WIDTHS), HighResolutionModule(WIDTHS))
        self.final_layer = nn.Conv2d(WIDTHS[0], JOINTS, 1)
        self.soft_argmax = SoftArgmax()
        self.apply(varied)
        nn.init.normal_(self.final_layer.weight, std=0.25)

    @staticmethod
    def transition(before: tuple[int, ...], after: tuple[int, ...]) -> nn.ModuleList:
        """Another width where it changes; a new resolution from the lowest one."""
        ways = []
        for i, width in enumerate(after):
            if i >= len(before):
                link = nn.Sequential(conv3x3(before[-1], width, 2), norm(width), nn.ReLU())
                ways.append(nn.Sequential(link))
            elif width != before[i]:
                ways.append(nn.Sequential(conv3x3(before[i], width), norm(width), nn.ReLU()))
            else:
                ways.append(None)
        return nn.ModuleList(ways)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.relu(self.bn1(self.conv1(images)))
        x = self.layer1(self.relu(self.bn2(self.conv2(x))))
        maps = self.stage2([way(x) for way in self.transition1])
        maps = [maps[i] if way is None else way(maps[-1]) for i, way in enumerate(self.transition2)]
        high, middle, low = self.stage3(maps)
        heatmaps = self.final_layer(high)
        coordinates = self.soft_argmax(heatmaps)
        joints = {"heatmaps": heatmaps, "coordinates": coordinates}
        return joints | {"high": high, "middle": middle, "low": low}


def people() -> tuple[Tensor, dict[str, Tensor]]:
    """A coloured spot for each joint in noise; the less of a joint is seen, the less it weighs."""
    joints = 1.4 * torch.rand(4, JOINTS, 2) - 0.7
    visible = (0.4 + 0.6 * torch.rand(4, JOINTS)) * (torch.rand(4, JOINTS) > 0.2)

    def spots(shape: tuple[int, int], size: float) -> Tensor:
        y, x = (SoftArgmax.centres(count, joints) for count in shape)
        far = (x - joints[..., None, :1]).square() + (y[:, None] - joints[..., None, 1:]).square()
        return (-far / (2 * size**2)).exp()

    colours = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, -1], [-1, 1, 1]]).to(joints)
    images = torch.einsum("njhw,jc,nj->nchw", spots(SHAPE, 0.12), 2 * colours, visible)
    target = {"heatmaps": spots(MAP, 0.2), "visible": visible, "coordinates": joints}
    return images + 0.3 * torch.randn(images.shape), target


def joints_loss(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Squared error of the heatmaps of what is visible, and how far off the coordinates are."""
    heatmaps = outputs["heatmaps"]
    weight = target["visible"].to(heatmaps)[:, :, None, None]
    squares = ((heatmaps - target["heatmaps"].to(heatmaps)) * weight).square().mean() / 2
    return squares + F.l1_loss(outputs["coordinates"], target["coordinates"].to(heatmaps))


def convolved(block: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Its numbered convolutions, each with its norm."""
    names = [name[4:] for name, _ in block.named_children() if name.startswith("conv")]
    return [(getattr(block, "conv" + i), getattr(block, "bn" + i)) for i in names]


def layers(module: HighResolutionModule, mark: str) -> Iterator[tuple[str, nn.Conv2d, nn.BatchNorm2d]]:
    """Each convolution of a round of exchange with its norm, and a name for both."""
    for j, (block,) in enumerate(module.branches):
        yield from ((f"{mark}{j}{end}", *pair) for end, pair in zip("ab", convolved(block), strict=True))
    for i, row in enumerate(module.fuse_layers):
        for j, way in enumerate(row):
            links = [] if way is None else [way] if j > i else way
            yield from ((f"{mark}{j}{i}{k}", link[0], link[1]) for k, link in enumerate(links))
