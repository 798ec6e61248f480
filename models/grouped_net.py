"""The grouped network of the question "what does groups=2 compute?": AlexNet's order on four tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

TILES = 4
POOLED = ("conv1_s1", "conv2_s1", "conv5_s1")


class GroupedNet(nn.Module):
    """Convs shared by four tiles, then three linear layers: puzzles [N, 4, 3, H, W] -> logits [N, classes].

    Known from the asker's state dict: names, shapes and order of the layers, hence channels, kernels, biases
    and groups=2 in conv2, conv4 and conv5; 4,868,056 parameters. fc7 reads 2048 = 4 x 512 numbers and there
    are 24 = 4! classes, so it is taken for a jigsaw puzzle of four tiles, a class for each order of them
    (Noroozi and Favaro, "Unsupervised learning of visual representations by solving jigsaw puzzles", ECCV
    2016).

    Not known, and chosen so that fc6 reads its 6336 = 192 x 11 x 3 numbers: tiles of 213 x 67 pixels, stride
    2 in conv1, padding 1 in the other convs, ReLU, and max-pools of 3 with stride 2 after conv1, conv2 and
    conv5. Which channel reaches which does not depend on these.

    Args:
        groups: of conv2, conv4 and conv5; 1 is the comparison without groups.
        tile: height and width of a tile, pixels; fc6 is as wide as they make it.
        channels: of the five convs.
        features: of fc6, for each tile, and of fc7.
        classes: length of the logits.

    Raises:
        ValueError: a size below one, channels that ``groups`` does not divide, a tile too small to pool.
    """

    def __init__(
        self,
        groups: int = 2,
        tile: Sequence[int] = (213, 67),
        channels: Sequence[int] = (96, 192, 256, 256, 192),
        features: Sequence[int] = (512, 256),
        classes: int = 24,
    ):
        super().__init__()
        _check(groups, tile, channels, features, classes)
        c1, c2, c3, c4, c5 = channels
        self.conv = nn.ModuleDict(
            {
                "conv1_s1": nn.Conv2d(3, c1, (25, 7), stride=2),
                "conv2_s1": nn.Conv2d(c1, c2, 3, padding=1, groups=groups),
                "conv3_s1": nn.Conv2d(c2, c3, 3, padding=1),
                "conv4_s1": nn.Conv2d(c3, c4, 3, padding=1, groups=groups),
                "conv5_s1": nn.Conv2d(c4, c5, 3, padding=1, groups=groups),
            }
        )
        self.pool = nn.MaxPool2d(3, stride=2)
        self.relu = nn.ReLU()
        height, width = pooled_size(tile)
        self.fc6 = nn.ModuleDict({"fc6_s1": nn.Linear(c5 * height * width, features[0])})
        self.fc7 = nn.ModuleDict({"fc7": nn.Linear(TILES * features[0], features[1])})
        self.classifier = nn.ModuleDict({"fc8": nn.Linear(features[1], classes)})

    def forward(self, puzzles: Tensor) -> Tensor:
        return self.scores(self.through(puzzles.flatten(0, 1), self.conv))

    def through(self, x: Tensor, names: Iterable[str]) -> Tensor:
        """``x`` through the convs of these names, each with its ReLU and, where it has one, its pool."""
        for name in names:
            x = self.relu(self.conv[name](x))
            x = self.pool(x) if name in POOLED else x
        return x

    def scores(self, pooled: Tensor) -> Tensor:
        """The linear layers: what conv5 leaves of N puzzles, [4 N, C, h, w], tile by tile -> [N, classes]."""
        tiles = self.relu(self.fc6["fc6_s1"](pooled.flatten(1)))
        together = tiles.unflatten(0, (-1, TILES)).flatten(1)
        return self.classifier["fc8"](self.relu(self.fc7["fc7"](together)))


def pooled_size(tile: Sequence[int]) -> tuple[int, int]:
    """Height and width of what fc6 reads of one tile: 213 x 67 pixels leave 11 x 3.

    Raises:
        ValueError: nothing is left of the tile.
    """
    sizes = []
    for pixels, kernel in zip(tile, (25, 7), strict=True):
        size = (pixels - kernel) // 2 + 1
        for _ in POOLED:
            size = (size - 3) // 2 + 1
        sizes.append(size)
    if min(sizes) < 1:
        raise ValueError(
            f"GroupedNet: nothing is left of tile={list(tile)} after three pools; write at least [53, 35]"
        )
    return sizes[0], sizes[1]


def _check(
    groups: int, tile: Sequence[int], channels: Sequence[int], features: Sequence[int], classes: int
) -> None:
    if (len(tile), len(channels), len(features)) != (2, 5, 2):
        sizes = f"tile={list(tile)}, channels={list(channels)}, features={list(features)}"
        raise ValueError(f"GroupedNet: {sizes} must be two, five and two numbers")
    if min(groups, *channels, *features, classes) < 1:
        sizes = f"groups={groups}, channels={list(channels)}, features={list(features)}, classes={classes}"
        raise ValueError(f"GroupedNet: {sizes} must all be 1 or more")
    if any(count % groups for count in channels):
        raise ValueError(
            f"GroupedNet: groups={groups} does not divide all of channels={list(channels)}; write, for "
            f"example, channels={[max(count // groups, 1) * groups for count in channels]}"
        )
