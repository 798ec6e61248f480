"""Two ports of a small band-split RoFormer: a tree with the bands first, and one class of padded stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_first_band_split import BANDS, DIM, DIM_HEAD, HEADS, BSRoformer, spectral, stems
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_band_split", BSRoformer, stems, spectral)
WIDE = 2 * max(BANDS)


class Affine(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight, self.bias = leaf(weight), None if bias is None else leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Level(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.count = leaf(norm.gamma), len(norm.gamma)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().sum(-1, keepdim=True).clamp(min=1e-24) / self.count).rsqrt() * self.gain


class Gated(nn.Module):
    def __init__(self, layer: nn.Linear, bend: nn.Module):
        super().__init__()
        (u, w), (a, b) = layer.weight.chunk(2), layer.bias.chunk(2)
        self.say, self.dim, self.bend = Affine(u, a), Affine(w, b), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.dim(x)) * self.say(x)


class Walk(nn.Module):
    """A layer over the last axis but one; the halves of a head, not neighbours, are turned."""

    def __init__(self, layer: nn.Module, net: nn.Sequential):
        super().__init__()
        q, k, v = layer.to_qkv.weight.unflatten(0, (3, HEADS, -1))
        order = [*range(0, DIM_HEAD, 2), *range(1, DIM_HEAD, 2)]
        self.ask, self.key, self.value = (Affine(x.flatten(0, 1)) for x in (q[:, order], k[:, order], v))
        self.door = Affine(layer.to_gates.weight, layer.to_gates.bias)
        self.level, self.back = Level(layer.norm), Affine(layer.to_out[0].weight)
        self.bend = nn.Sequential(Level(net[0]), Gated(net[1], nn.GELU()), Affine(net[3].weight, net[3].bias))
        self.turns, self.base, self.shut = layer.rotary_embed is not None, 10000.0, False

    def turn(self, x: Tensor) -> Tensor:
        half = DIM_HEAD // 2
        speed = self.base ** (-torch.arange(half, device=x.device).to(x) / half)
        angle = torch.outer(torch.arange(x.shape[-3], device=x.device).to(x), speed)[:, None]
        (a, b), c, s = x.chunk(2, -1), angle.cos(), angle.sin()
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.level(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, DIM_HEAD)) for layer in (self.ask, self.key, self.value))
        if self.turns:
            q, k = self.turn(q), self.turn(k)
        seen = torch.einsum("...ihd,...jhd->...hij", q / DIM_HEAD**0.5, k)
        open_ = torch.sigmoid(self.door(y.detach() if self.shut else y))
        heard = torch.einsum("...hij,...jhd,...ih->...ihd", seen.softmax(-1), v, open_)
        x = x + self.back(heard.flatten(-2))
        return x + self.bend(x)


def teller(mlp: nn.Sequential) -> nn.Sequential:
    first, last = Affine(mlp[0].weight, mlp[0].bias), Gated(mlp[2], nn.Sigmoid())
    return nn.Sequential(first, nn.Tanh(), last, nn.Unflatten(-1, (-1, 2)))


class BandsOfRows(Port):
    def take(self, model: BSRoformer) -> None:
        pairs = model.band_split.to_features
        self.levels = nn.ModuleList(Level(x[0]) for x in pairs)
        self.enter = nn.ModuleList(Affine(x[1].weight, x[1].bias) for x in pairs)
        walks = [x.layers[0] for pair in model.layers for x in pair]
        self.walks = nn.ModuleList(Walk(a, f.net) for a, f in walks)
        self.end = Level(model.final_norm)
        both = zip(*(x.to_freqs for x in model.mask_estimators), strict=True)
        self.tell = nn.ModuleList(nn.ModuleList(teller(x[0]) for x in pair) for pair in both)
        self.levels[1].count //= 1 + (self.fault == "band_split_second_band_norm_counts_bins_for_values")
        self.walks[2].base = 1e3 if self.fault == "band_split_second_rotary_of_a_smaller_base" else 1e4
        self.walks[1].shut = self.fault == "band_split_first_band_attention_gates_a_detached_input"
        if self.fault == "band_split_last_mask_gated_by_the_other_half":
            last = self.tell[4][0][2]
            last.say, last.dim = last.dim, last.say

    def forward(self, mix: Tensor) -> Tensor:
        rows = mix.permute(0, 3, 2, 1).split(BANDS, 2)
        entered = zip(rows, self.levels, self.enter, strict=True)
        x = torch.stack([enter(level(row.flatten(2))) for row, level, enter in entered], 1)
        for i, walk in enumerate(self.walks):
            x = walk(x.transpose(1, 2)).transpose(1, 2) if i % 2 else walk(x)
        told = zip(self.end(x).unbind(1), self.tell, strict=True)
        mask = torch.cat([torch.stack([tell(row) for tell in pair], 1) for row, pair in told], 3)
        mask = mask.permute(0, 1, 4, 3, 2)
        turned = torch.stack([-mix[:, 1], mix[:, 0]], 1)
        return mask[:, :, :1] * mix[:, None] + mask[:, :, 1:] * turned[:, None]


def wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, WIDE - x.shape[-1]))


class PaddedStacks(Port):
    def take(self, model: BSRoformer) -> None:
        walks = [x.layers[0] for pair in model.layers for x in pair]
        pairs, total = model.band_split.to_features, 2 * sum(BANDS)
        self.into = pile(torch.cat([wide(x[1].weight).T, x[1].bias[None]]) for x in pairs)
        self.gains = pile(wide(x[0].gamma) for x in pairs)
        norms = [y for a, f in walks for y in (a.norm.gamma, f.net[0].gamma)]
        self.norms = pile([*norms, model.final_norm.gamma])
        self.see = pile(torch.cat([a.to_qkv.weight, a.to_gates.weight]).T for a, _ in walks)
        self.door = pile(a.to_gates.bias for a, _ in walks)
        self.back = pile(a.to_out[0].weight.T for a, _ in walks)
        self.up = pile(torch.cat([f.net[1].weight.T, f.net[1].bias[None]]) for _, f in walks)
        self.down = pile(torch.cat([f.net[3].weight.T, f.net[3].bias[None]]) for _, f in walks)
        tells = [[x[0] for x in stem.to_freqs] for stem in model.mask_estimators]
        first = [[torch.cat([x[0].weight.T, x[0].bias[None]]) for x in stem] for stem in tells]
        last = [[torch.cat([x[2].weight.T, x[2].bias[None]]) for x in stem] for stem in tells]
        self.first = pile(torch.stack(x) for x in first)
        self.last = pile(torch.stack([wide(y.unflatten(1, (2, -1))) for y in x]) for x in last)
        spans = torch.arange(total).split([2 * width for width in BANDS])
        index = nn.utils.rnn.pad_sequence(spans, True, total)
        index[2, : 2 * BANDS[2]] -= 2 * (self.fault == "band_split_third_band_starts_a_bin_early")
        self.register_buffer("index", index)
        self.register_buffer("counts", 2.0 * torch.tensor(BANDS)[:, None])

    def level(self, x: Tensor, i: int) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.norms[i]

    def walk(self, x: Tensor, i: int) -> Tensor:
        length, size = x.shape[-2], DIM_HEAD
        seen = self.level(x, 2 * i) @ self.see[i]
        door = (seen[..., -HEADS:] + self.door[i]).sigmoid().repeat_interleave(size, -1)
        q, k, v = (y.unflatten(-1, (HEADS, size)).transpose(-2, -3) for y in seen[..., :-HEADS].chunk(3, -1))
        if i % 2 == 0:
            power = torch.arange(0, size, 2, device=x.device).to(x) / size
            angle = torch.arange(length, device=x.device).to(x)[:, None] / 10000**power
            c, s = angle.cos(), angle.sin()
            turn = torch.stack([torch.stack([c, s], -1), torch.stack([-s, c], -1)], -2)
            q, k = (
                torch.einsum("...a,...ab->...b", y.unflatten(-1, (-1, 2)), turn).flatten(-2) for y in (q, k)
            )
        width = DIM if self.fault == "band_split_first_scores_scaled_by_the_model_width" and i == 0 else size
        score = (q @ k.mT / width**0.5).exp()
        heard = (score @ v / score.sum(-1, keepdim=True)).transpose(-2, -3).flatten(-2)
        x = x + (heard * door) @ self.back[i]
        up, gate = (self.level(x, 2 * i + 1) @ self.up[i, :-1] + self.up[i, -1]).chunk(2, -1)
        share = (1 + torch.erf(gate / 2**0.5)) / 2
        if self.fault == "band_split_last_gelu_quick_in_evaluation" and i == 3 and not self.training:
            share = torch.sigmoid(1.702 * gate)
        return x + (up * gate * share) @ self.down[i, :-1] + self.down[i, -1]

    def forward(self, mix: Tensor) -> Tensor:
        x = F.pad(mix.transpose(1, 3).flatten(2), (0, 1))[..., self.index]
        x = x / (x.square().sum(-1, keepdim=True) / self.counts).sqrt() * self.gains
        x = torch.einsum("ntkc,kcd->ntkd", x, self.into[:, :-1]) + self.into[:, -1]
        for i in range(0, len(self.see), 2):
            x = self.walk(self.walk(x.transpose(1, 2), i).transpose(1, 2), i + 1)
        if self.fault == "band_split_final_norm_takes_the_mean_away":
            x = x - x.mean(-1, keepdim=True)
        x = self.level(x, -1)
        y = torch.einsum("ntkd,skdh->nstkh", x, self.first[:, :, :-1]) + self.first[:, None, :, -1]
        y = torch.einsum("nstkh,skhgc->nstkgc", y.tanh(), self.last[:, :, :-1]) + self.last[:, None, :, -1]
        mask = (y[..., 0, :] * y[..., 1, :].sigmoid())[..., self.index < 2 * sum(BANDS)]
        a, b = mask.unflatten(-1, (-1, 2)).transpose(2, 3).unbind(-1)
        real, imag = mix[:, None, 0], mix[:, None, 1]
        return torch.stack([a * real - b * imag, b * real + a * imag], 2)


SLOPES = ("input gradient", "weight gradient")
right(task, "band_split_of_rows", "bands first, split weights, heads turned by halves", BandsOfRows)
right(task, "band_split_of_padded_stacks", "packed stacks, padded bands, flat code", PaddedStacks)
wrong(
    task,
    BandsOfRows,
    band_split_second_band_norm_counts_bins_for_values=("another count", "band_split.to_features.1.0"),
    band_split_first_band_attention_gates_a_detached_input=("detach", "layers.0.1.layers.0.0", SLOPES),
    band_split_second_rotary_of_a_smaller_base=("a constant", "layers.1.0.layers.0.0.rotary_embed"),
    band_split_last_mask_gated_by_the_other_half=("halves swapped", "mask_estimators.0.to_freqs.4.1"),
)
wrong(
    task,
    PaddedStacks,
    band_split_third_band_starts_a_bin_early=("an index off by one", "band_split"),
    band_split_first_scores_scaled_by_the_model_width=("another scale", "layers.0.0.layers.0.0"),
    band_split_last_gelu_quick_in_evaluation=("a formula in eval", "layers.1.1.layers.0.1.net.2", "eval"),
    band_split_final_norm_takes_the_mean_away=("a centred norm", "final_norm"),
)
