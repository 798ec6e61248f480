"""What a small Stable Audio with the channels last is made of: moves over rows, and steps of its prior."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import leaf
from bench.held_back._twenty_ninth_stable_audio_parts import HEAD


def normed(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The size and the direction of a weight-normed kernel."""
    both = layer.parametrizations.weight
    return both.original0, both.original1


class Kernel(nn.Module):
    """A weight-normed convolution of [N, T, C] by windows; a transposed one spreads its input first."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        size, way = normed(layer)
        self.turned = isinstance(layer, nn.ConvTranspose1d)
        self.step, self.gap = layer.stride[0], layer.dilation[0]
        way = way.flip(2).permute(2, 0, 1) if self.turned else way.permute(2, 1, 0)
        self.size, self.way = leaf(size[..., 0] if self.turned else size[:, 0, 0]), leaf(way)
        self.axes = (0, 2) if self.turned else (0, 1)
        self.edge = len(way) - 1 - layer.padding[0] if self.turned else layer.padding[0]
        self.offset = 0 if layer.bias is None else leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        kernel, step = self.size * self.way / self.way.square().sum(self.axes, True).sqrt(), self.step
        if self.turned:
            x, step = F.pad(x[:, :, None], (0, 0, 0, step - 1)).flatten(1, 2)[:, : 1 - step], 1
        x = F.pad(x, (0, 0, self.edge, self.edge))
        count = (x.shape[1] - self.gap * (len(kernel) - 1) - 1) // step + 1
        places = torch.arange(count)[:, None] * step + torch.arange(len(kernel)) * self.gap
        return x[:, places].flatten(2) @ kernel.flatten(0, 1) + self.offset


class Wave(nn.Module):
    """A snake by the double angle."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.pace, self.depth = leaf(layer.alpha), leaf(layer.beta)

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 - (2 * self.pace.exp() * x).cos()) / (2 * (self.depth.exp() + 1e-9))


class Unit(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def chain(layers: nn.Sequential) -> list[nn.Module]:
    """Waves, kernels and units in one row."""
    row = []
    for layer in layers:
        if type(layer).__name__ == "ResidualUnit":
            row.append(Unit(*chain(layer.layers)))
        elif hasattr(layer, "layers"):
            row += chain(layer.layers)
        else:
            row.append(Wave(layer) if hasattr(layer, "alpha") else Kernel(layer))
    return row


class Scaled(nn.Module):
    """A norm of the last axis."""

    def __init__(self, gain: Tensor, offset: Tensor, eps: float):
        super().__init__()
        self.gain, self.eps = leaf(gain), eps
        if isinstance(offset, nn.Parameter):
            self.offset = leaf(offset)
        else:
            self.register_buffer("offset", offset.clone())

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - middle) * (spread + self.eps).rsqrt() * self.gain + self.offset


class Look(nn.Module):
    """Attention with a weight for each of the queries, the keys and the values, by complex turns."""

    def __init__(self, norm: nn.Module, layer: nn.Module, rates: Tensor):
        super().__init__()
        own = hasattr(layer, "to_qkv")
        ws = layer.to_qkv.weight.chunk(3) if own else (layer.to_q.weight, *layer.to_kv.weight.chunk(2))
        self.ask, self.key, self.value = (leaf(w.unflatten(0, (-1, HEAD))) for w in ws)
        self.end, self.before = leaf(layer.to_out.weight.T.unflatten(0, (-1, HEAD))), Scaled(*learnt(norm))
        self.norms = nn.ModuleList(Scaled(x.weight, x.bias, x.eps) for x in (layer.q_norm, layer.k_norm))
        self.register_buffer("rates", rates.clone())
        self.paired, self.group = False, layer.num_heads // layer.kv_heads

    def turn(self, x: Tensor) -> Tensor:
        """[N, T, H, D]: the first half of each head is turned by its place."""
        x, rest = x.chunk(2, -1)
        angle = torch.arange(x.shape[1])[:, None, None] * self.rates
        pairs = x.unflatten(-1, (-1, 2)) if self.paired else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
        z = torch.view_as_real(z)
        return torch.cat([(z if self.paired else z.transpose(-1, -2)).flatten(-2), rest], -1)

    def forward(self, x: Tensor, words: Tensor | None = None, real: Tensor | None = None) -> Tensor:
        y = self.before(x)
        given = y if words is None else words
        pairs = (y, self.ask), (given, self.key), (given, self.value)
        q, k, v = (torch.einsum("ntc,hdc->nthd", *pair) for pair in pairs)
        q, k = self.norms[0](q), self.norms[1](k)
        if words is None:
            q, k = self.turn(q), self.turn(k)
        q = q.unflatten(2, (-1, self.group)) / math.sqrt(HEAD)
        power = torch.einsum("nthgd,nshd->nhgts", q, k)
        if real is not None:
            power = power.where(real[:, None, None, None], -math.inf)
        mixed = torch.einsum("nhgts,nshd->nthgd", power.softmax(-1), v).flatten(2, 3)
        return x + torch.einsum("nthd,hdc->ntc", mixed, self.end)


def learnt(norm: nn.Module) -> tuple[Tensor, Tensor, float]:
    return norm.gamma, norm.beta, 1e-5


class Think(nn.Module):
    def __init__(self, norm: nn.Module, ff: nn.Module):
        super().__init__()
        self.before, (glu, down) = Scaled(*learnt(norm)), ff
        (self.up, self.gate), (self.b, self.c) = (
            map(leaf, x.chunk(2)) for x in (glu.proj.weight, glu.proj.bias)
        )
        self.down, self.d = leaf(down.weight), leaf(down.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gate = y @ self.gate.T + self.c
        return x + (y @ self.up.T + self.b) * gate * gate.sigmoid() @ self.down.T + self.d
