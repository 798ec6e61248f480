"""The residual policy network for board games of the AlphaZero kind (Silver et al., Science 2018), small."""

from __future__ import annotations

from torch import Tensor, nn

NORMS = {"batch": nn.BatchNorm2d, "identity": lambda channels: nn.Identity()}


class Add(nn.Module):
    """The sum of two tensors of one shape, as a module, so that a hook sees the shortcut under its name."""

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return x + shortcut


class ConvBlock(nn.Module):
    """3x3 conv without bias, norm, ReLU: [N, inputs, H, W] -> [N, filters, H, W]."""

    def __init__(self, inputs: int, filters: int, norm: str = "batch"):
        super().__init__()
        self.conv = nn.Conv2d(inputs, filters, 3, padding=1, bias=False)
        self.batch = _norm(norm, filters)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.batch(self.conv(x)))


class ResBlock(nn.Module):
    """Conv, norm, ReLU, conv, norm, plus the input, ReLU: [N, filters, H, W] -> the same shape."""

    def __init__(self, filters: int, norm: str = "batch"):
        super().__init__()
        self.conv1 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.batch1 = _norm(norm, filters)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.batch2 = _norm(norm, filters)
        self.add = Add()
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = self.batch2(self.conv2(self.act1(self.batch1(self.conv1(x)))))
        return self.act2(self.add(residual, x))


class PolicyHead(nn.Module):
    """1x1 conv to two channels, norm, ReLU, linear: [N, filters, *board] -> logits [N, moves]."""

    def __init__(self, filters: int, board: tuple[int, int] = (7, 6), moves: int = 7, norm: str = "batch"):
        super().__init__()
        self.conv = nn.Conv2d(filters, 2, 1, bias=False)
        self.batch = _norm(norm, 2)
        self.act = nn.ReLU()
        self.linear = nn.Linear(2 * board[0] * board[1], moves)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(self.batch(self.conv(x))).flatten(1))


class PolicyNet(nn.Module):
    """A conv block, residual blocks and a policy head: boards [N, planes, *board] -> logits [N, moves].

    Weights are drawn in the order conv block, residual blocks, head, so that from one seed networks of
    different depths share the blocks that they have in common.

    Args:
        blocks: how many residual blocks.
        filters: channels between them.
        planes: channels of a board.
        board: height and width, in fields.
        moves: length of the logits.
        norm: "batch", or "identity" in its place.

    Raises:
        ValueError: for an unknown norm, a size below one, a negative number of blocks.
    """

    def __init__(
        self,
        blocks: int = 19,
        filters: int = 64,
        planes: int = 2,
        board: tuple[int, int] = (7, 6),
        moves: int = 7,
        norm: str = "batch",
    ):
        super().__init__()
        if blocks < 0:
            raise ValueError(f"PolicyNet: blocks={blocks} must be 0 or more")
        if min(filters, planes, *board, moves) < 1:
            sizes = f"filters={filters}, planes={planes}, board={tuple(board)}, moves={moves}"
            raise ValueError(f"PolicyNet: {sizes} must all be 1 or more")
        self.conv_block = ConvBlock(planes, filters, norm)
        self.res_blocks = nn.ModuleList(ResBlock(filters, norm) for _ in range(blocks))
        self.policy_head = PolicyHead(filters, board, moves, norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_block(x)
        for block in self.res_blocks:
            x = block(x)
        return self.policy_head(x)


def _norm(name: str, channels: int) -> nn.Module:
    if name not in NORMS:
        raise ValueError(f"PolicyNet: norm={name!r} is not known; write one of {', '.join(NORMS)}")
    return NORMS[name](channels)
