"""A ConvNeXt with channels first and 1 x 1 convs, against one with channels last and matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _classes, _task


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of [N, C, H, W]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(1, keepdim=True)
        y = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class CNBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = ChannelNorm(width)
        self.pwconv1 = nn.Conv2d(width, 3 * width, 1)
        self.act = nn.GELU()
        self.pwconv2 = nn.Conv2d(3 * width, width, 1)
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(self.dwconv(x)))))


class ConvNeXt(nn.Module):
    """[N, 3, 16, 16] -> [N, 6]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.stem_norm = ChannelNorm(16)
        self.stage1 = nn.Sequential(CNBlock(16), CNBlock(16))
        self.down_norm, self.down = ChannelNorm(16), nn.Conv2d(16, 24, 2, 2)
        self.stage2 = nn.Sequential(CNBlock(24))
        self.norm = nn.LayerNorm(24, eps=1e-6)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage1(self.stem_norm(self.stem(x)))
        x = self.stage2(self.down(self.down_norm(x)))
        return self.head(self.norm(x.mean((2, 3))))


convnext = _task("ported_convnext", ConvNeXt, lambda: (torch.randn(6, 3, 16, 16), _classes(6, 6)))
BLOCKS = ("stage1.0", "stage1.1", "stage2.0")
CHANNEL_NORMS = ("stem_norm", "down_norm", *(f"{block}.norm" for block in BLOCKS))


def last_norm(norm: ChannelNorm, eps: float = 1e-6) -> nn.LayerNorm:
    made = nn.LayerNorm(norm.weight.shape[0], eps=eps)
    made.weight, made.bias = copied(norm.weight), copied(norm.bias)
    return made


def patches(x: Tensor, size: int) -> Tensor:
    """[N, H, W, C] -> [N, H / size, W / size, size * size * C]."""
    x = x.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return x.transpose(2, 3).flatten(3)


class Cell(nn.Module):
    """Channels last; the scale of the branch may be a buffer, which does not learn."""

    def __init__(self, block: CNBlock, eps: float, frozen: bool):
        super().__init__()
        self.depthwise = block.dwconv
        self.ln = last_norm(block.norm, eps)
        self.mlp = nn.Sequential(
            linear_of(block.pwconv1.weight.flatten(1), block.pwconv1.bias),
            nn.GELU(),
            linear_of(block.pwconv2.weight.flatten(1), block.pwconv2.bias),
        )
        if frozen:
            self.register_buffer("layer_scale", block.gamma.detach().flatten().clone())
        else:
            self.layer_scale = copied(block.gamma.flatten())

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.layer_scale * self.mlp(self.ln(y))


class ChannelsLast(nn.Module):
    """Stem and downsampling are matrices over patches."""

    def __init__(self, model: ConvNeXt, eps: float = 1e-6, frozen: bool = False):
        super().__init__()
        self.embed = linear_of(model.stem.weight.permute(0, 2, 3, 1).flatten(1), model.stem.bias)
        self.embed_norm = last_norm(model.stem_norm, eps)
        blocks = (*model.stage1, *model.stage2)
        self.cells = nn.ModuleList(Cell(block, eps, frozen) for block in blocks)
        self.merge_norm = last_norm(model.down_norm, eps)
        self.merge = linear_of(model.down.weight.permute(0, 2, 3, 1).flatten(1), model.down.bias)
        self.top = nn.Sequential(model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_norm(self.embed(patches(x.permute(0, 2, 3, 1), 4)))
        x = self.cells[1](self.cells[0](x))
        x = self.cells[2](self.merge(patches(self.merge_norm(x), 2)))
        return self.top(x.mean((1, 2)))


class Stacked(nn.Module):
    """Blocks of one width have their weights in one stack, as a scan over the layers wants them."""

    def __init__(self, model: ConvNeXt):
        super().__init__()
        self.stem, self.middle = nn.Sequential(model.stem, model.stem_norm), model.stage2[0]
        self.shrink, self.top = (
            nn.Sequential(model.down_norm, model.down),
            nn.Sequential(model.norm, model.head),
        )
        weights = [dict(block.named_parameters()) for block in model.stage1]
        self.scanned = nn.ParameterDict(
            {name.replace(".", "_"): copied(torch.stack([w[name] for w in weights])) for name in weights[0]}
        )

    def forward(self, x: Tensor) -> Tensor:
        x, w = self.stem(x), self.scanned
        for i in range(w["gamma"].shape[0]):
            y = F.conv2d(x, w["dwconv_weight"][i], w["dwconv_bias"][i], padding=2, groups=16)
            y = F.layer_norm(y.movedim(1, -1), (16,), w["norm_weight"][i], w["norm_bias"][i], 1e-6)
            y = F.linear(y, w["pwconv1_weight"][i].flatten(1), w["pwconv1_bias"][i])
            y = F.linear(F.gelu(y), w["pwconv2_weight"][i].flatten(1), w["pwconv2_bias"][i])
            x = torch.addcmul(x, y.movedim(-1, 1), w["gamma"][i])
        return self.top(self.middle(self.shrink(x)).flatten(2).mean(2))
