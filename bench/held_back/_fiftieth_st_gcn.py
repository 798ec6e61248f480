"""A small STGCN with the last block and the skips of Graph WaveNet: traffic to come on a road graph."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NODES, SEEN, AHEAD, SAMPLES, SKIP, END = 7, 12, 5, 3, 30, 34
BLOCKS = ((3, (2, 24, 10, 20)), (3, (20, 28, 12, 26)), (2, (26, 32, 9, 22)))


def roads() -> Tensor:
    """A directed weighted graph, an edge from each node to itself left out."""
    i = torch.arange(NODES)
    weights = torch.exp(-((i[:, None] - i - 0.3).abs() / 2)) * (0.6 + 0.4 * torch.rand(NODES, NODES))
    return weights * (weights > 0.2) * (1 - torch.eye(NODES))


def scaled_laplacian(adj: Tensor) -> Tensor:
    """2 L / lambda_max - I of the random walk's Laplacian."""
    laplacian = torch.eye(NODES) - adj / adj.sum(1, keepdim=True)
    return 2 * laplacian / torch.linalg.eigvals(laplacian).abs().max() - torch.eye(NODES)


class StandardScaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([52.0, 0.5]))
        self.register_buffer("std", torch.tensor([11.0, 0.29]))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean[:, None, None]) / self.std[:, None, None]

    def inverse_transform(self, x: Tensor) -> Tensor:
        return x * self.std[0] + self.mean[0]


class Align(nn.Module):
    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.c_in, self.c_out = c_in, c_out
        if c_in > c_out:
            self.align_conv = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.c_in > self.c_out:
            return self.align_conv(x)
        return F.pad(x, (0, 0, 0, 0, 0, self.c_out - self.c_in))


class TemporalConvLayer(nn.Module):
    def __init__(self, kt: int, c_in: int, c_out: int):
        super().__init__()
        self.kt = kt
        self.align = Align(c_in, c_out)
        self.causal_conv = nn.Conv2d(c_in, 2 * c_out, (kt, 1))

    def forward(self, x: Tensor) -> Tensor:
        x_in = self.align(x)[:, :, self.kt - 1 :]
        x_p, x_q = self.causal_conv(x).chunk(2, 1)
        return (x_p + x_in) * torch.sigmoid(x_q)


class ChebGraphConv(nn.Module):
    def __init__(self, channels: int, adj: Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, channels, channels) / math.sqrt(3 * channels))
        self.bias = nn.Parameter(0.1 * torch.randn(channels))
        self.register_buffer("gso", scaled_laplacian(adj))

    def forward(self, x: Tensor) -> Tensor:
        x_0 = x.permute(0, 2, 3, 1)
        x_1 = torch.einsum("hi,btij->bthj", self.gso, x_0)
        x_2 = torch.einsum("hi,btij->bthj", 2 * self.gso, x_1) - x_0
        y = torch.einsum("btkhi,kij->bthj", torch.stack([x_0, x_1, x_2], 2), self.weight) + self.bias
        return y.permute(0, 3, 1, 2)


class DiffusionGraphConv(nn.Module):
    """Two hops along the roads, against them, and by an adjacency that is learned."""

    def __init__(self, channels: int, adj: Tensor, rank: int = 4):
        super().__init__()
        self.nodevec1 = nn.Parameter(torch.randn(NODES, rank))
        self.nodevec2 = nn.Parameter(torch.randn(rank, NODES))
        self.register_buffer("forward_support", adj / adj.sum(1, keepdim=True))
        self.register_buffer("backward_support", adj.T / adj.T.sum(1, keepdim=True))
        self.mlp = nn.Conv2d(7 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        adp = F.softmax(F.relu(self.nodevec1 @ self.nodevec2), 1)
        out = [x]
        for a in (self.forward_support, self.backward_support, adp):
            x1 = torch.einsum("bctv,vw->bctw", x, a)
            out += [x1, torch.einsum("bctv,vw->bctw", x1, a)]
        return self.mlp(torch.cat(out, 1))


class GraphConvLayer(nn.Module):
    def __init__(self, c_in: int, c_out: int, adj: Tensor, kind: type[nn.Module]):
        super().__init__()
        self.align = Align(c_in, c_out)
        self.gc = kind(c_out, adj)

    def forward(self, x: Tensor) -> Tensor:
        x_gc_in = self.align(x)
        return self.gc(x_gc_in) + x_gc_in


class STConvBlock(nn.Module):
    def __init__(self, kt: int, channels: tuple[int, ...], adj: Tensor, kind: type[nn.Module]):
        super().__init__()
        c_in, c_1, c_2, c_out = channels
        self.tmp_conv1 = TemporalConvLayer(kt, c_in, c_1)
        self.graph_conv = GraphConvLayer(c_1, c_2, adj, kind)
        self.relu = nn.ReLU()
        self.tmp_conv2 = TemporalConvLayer(kt, c_2, c_out)
        self.tc2_ln = nn.LayerNorm([NODES, c_out])

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.graph_conv(self.tmp_conv1(x)))
        return self.tc2_ln(self.tmp_conv2(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class STGCN(nn.Module):
    """Speeds and times of day [B, 2, T, N] -> speeds to come [B, AHEAD, N]."""

    def __init__(self):
        super().__init__()
        adj = roads()
        kinds = (ChebGraphConv, ChebGraphConv, DiffusionGraphConv)
        self.scaler = StandardScaler()
        blocks = (STConvBlock(*sizes, adj, kind) for sizes, kind in zip(BLOCKS, kinds, strict=True))
        self.st_blocks = nn.ModuleList(blocks)
        self.skip_convs = nn.ModuleList(nn.Conv2d(channels[-1], SKIP, 1) for _, channels in BLOCKS)
        self.end_conv_1 = nn.Conv2d(SKIP, END, (2, 1))
        self.end_conv_2 = nn.Conv2d(END, AHEAD, 1)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x, skip = self.scaler(x), None
        for block, skip_conv in zip(self.st_blocks, self.skip_convs, strict=True):
            x = block(x)
            s = skip_conv(x)
            skip = s if skip is None else s + skip[:, :, -s.shape[2] :]
        x = F.relu(self.end_conv_1(F.relu(skip)))
        return self.scaler.inverse_transform(self.end_conv_2(x).squeeze(2))


def traffic() -> tuple[Tensor, Tensor]:
    """Speeds that fall in rush hours, later down the road; a sensor that is silent says zero."""
    steps = torch.arange(SEEN + AHEAD)[:, None]
    day = (torch.rand(SAMPLES, 1, 1) + steps / 96) % 1
    rush = torch.exp(-((day - 0.35 - 0.03 * torch.arange(NODES)) / 0.1).square())
    speed = 60 - 30 * rush + 2 * torch.randn(SAMPLES, SEEN + AHEAD, NODES)
    speed = speed * (torch.rand_like(speed) > 0.08)
    x = torch.stack([speed, day.expand_as(speed)], 1)
    return x[:, :, :SEEN], speed[:, SEEN:]


def masked_mae(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean error where something was measured, by ten."""
    mask = (target != 0).to(outputs)
    return ((outputs - target).abs() * mask).sum() / mask.sum().clamp(min=1) / 10
