"""Two ports of a diffusion transformer: gated branches of modules, and stacked weights in one pass."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _eleventh_diffusion_transformer as dit
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eleventh_diffusion_transformer", dit.DiT, dit.noised, dit.noise_and_spread)
PATCH, HEADS, WIDTH, DEPTH = dit.PATCH, dit.HEADS, dit.WIDTH, dit.DEPTH


def dense(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = leaf(weight), leaf(bias)
    return layer


def steered(x: Tensor, shift: Tensor, scale: Tensor, lost: int = 0) -> Tensor:
    """Each token less its mean, over its deviation, scaled and shifted."""
    spread, mean = torch.var_mean(x, -1, correction=lost, keepdim=True)
    return shift + (1 + scale) * (x - mean) / (spread + 1e-6).sqrt()


def places(side: int, x: Tensor) -> Tensor:
    """Sines and cosines for a square grid [side, side, D]: the column first, then the row."""
    quarter = x.shape[-1] // 4
    rates = torch.exp(torch.arange(quarter).to(x) * (-math.log(1e4) / quarter))
    angles = torch.outer(torch.arange(side).to(x), rates)
    line = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.cat(torch.broadcast_tensors(line, line[:, None]), 2)


class Pieces(nn.Module):
    """Pictures [N, C, H, W] cut in a grid [N, H / P, W / P, D] by one product, channels last, with places."""

    def __init__(self, conv: nn.Conv2d, fault: str):
        super().__init__()
        self.fault, self.lift = fault, dense(conv.weight.permute(0, 2, 3, 1).flatten(1), conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        inside = (5, 3) if self.fault == "patch_pixels_listed_column_by_column" else (3, 5)
        x = self.lift(x.permute(0, 2, 4, *inside, 1).flatten(3))
        return x + places(x.shape[1], x)


class Clock(nn.Module):
    def __init__(self, mlp: nn.Sequential, fault: str):
        super().__init__()
        self.fault = fault
        self.inner, self.outer = (dense(layer.weight, layer.bias) for layer in (mlp[0], mlp[2]))

    def forward(self, t: Tensor) -> Tensor:
        count = self.inner.in_features // 2
        gaps = count - 1 if self.fault == "diffusion_clock_reaches_the_longest_period" else count
        angles = t[:, None] / 10000 ** (torch.arange(count).to(self.inner.weight) / gaps)
        return self.outer(F.silu(self.inner(torch.cat([angles.cos(), angles.sin()], 1))))


class Mixing(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.query, self.key, self.value = map(dense, attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3))
        self.out = dense(attn.proj.weight, attn.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (HEADS, -1)) for part in (self.query, self.key, self.value))
        shares = (torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])).softmax(3)
        return self.out(torch.einsum("nhqk,nkhd->nqhd", shares, v).flatten(2))


class Branch(nn.Module):
    def __init__(self, inner: nn.Module, weight: Tensor, bias: Tensor):
        super().__init__()
        self.inner, self.steer, self.lost = inner, dense(weight, bias), 0

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        shift, scale, gate = self.steer(signal)[:, None].chunk(3, 2)
        return x + gate * self.inner(steered(x, shift, scale, self.lost))


class Canvas(nn.Module):
    def __init__(self, final: nn.Module, fault: str):
        super().__init__()
        self.fault, steer, brush = fault, final.adaLN_modulation[1], final.linear
        self.steer, self.brush = dense(steer.weight, steer.bias), dense(brush.weight, brush.bias)

    def forward(self, x: Tensor, signal: Tensor) -> Tensor:
        shift, scale = self.steer(signal)[:, None, None].chunk(2, 3)
        if self.fault == "canvas_takes_the_scale_before_the_shift":
            shift, scale = scale, shift
        x = self.brush(steered(x, shift, scale)).unflatten(3, (PATCH, PATCH, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class Painter(Port):
    """Pieces on a grid, pairs of branches steered by one signal, and a canvas of 2C channels."""

    def take(self, model: dit.DiT) -> None:
        self.pieces = Pieces(model.x_embedder.proj, self.fault)
        self.clock = Clock(model.t_embedder.mlp, self.fault)
        self.kinds, self.branches = leaf(model.y_embedder.embedding_table.weight), nn.ModuleList()
        for block in model.blocks:
            up, down = (dense(layer.weight, layer.bias) for layer in (block.mlp.fc1, block.mlp.fc2))
            inner = Mixing(block.attn), nn.Sequential(up, nn.GELU("tanh"), down)
            steer = block.adaLN_modulation[1]
            self.branches.extend(map(Branch, inner, steer.weight.chunk(2), steer.bias.chunk(2)))
        if self.fault == "gated_branch_divides_by_the_unbiased_deviation":
            self.branches[3].lost = 1
        self.canvas = Canvas(model.final_layer, self.fault)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        filler = dit.LABELS if self.fault == "diffusion_null_label_learns_nothing" else None
        signal = F.silu(self.clock(t) + F.embedding(y, self.kinds, padding_idx=filler))
        grid = self.pieces(x)
        tokens = grid.flatten(1, 2)
        for branch in self.branches:
            tokens = branch(tokens, signal)
        return self.canvas(tokens.view_as(grid), signal)


class OnePass(Port):
    """Tokens [T, N, D]; weights of all blocks in piles, their modulations in one batched product."""

    def take(self, model: dit.DiT) -> None:
        cut, (tick, _, tock), end = model.x_embedder.proj, model.t_embedder.mlp, model.final_layer
        one = {"cut": cut, "tick": tick, "tock": tock, "last": end.adaLN_modulation[1], "end": end.linear}
        self.w = nn.ParameterDict({name: leaf(x.weight.flatten(1).T) for name, x in one.items()})
        self.b = nn.ParameterDict({name: leaf(x.bias) for name, x in one.items()})
        many = {"qkv": "attn.qkv", "proj": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2"}
        for name, source in (many | {"steer": "adaLN_modulation.1"}).items():
            layers = [block.get_submodule(source) for block in model.blocks]
            self.w[name], self.b[name] = pile(x.weight.T for x in layers), pile(x.bias for x in layers)
        self.labels = leaf(model.y_embedder.embedding_table.weight)

    def lin(self, name: str, x: Tensor, i: int | None = None) -> Tensor:
        w, b = self.w[name], self.b[name]
        return x @ w + b if i is None else x @ w[i] + b[i]

    def attend(self, i: int, x: Tensor) -> Tensor:
        q, k, v = self.lin("qkv", x, i).unflatten(2, (3, HEADS, -1)).permute(2, 1, 3, 0, 4).flatten(1, 2)
        width = WIDTH if self.fault == "patch_scores_over_the_wrong_root" and i == 0 else WIDTH // HEADS
        mixed = torch.bmm(torch.bmm(q * width**-0.5, k.mT).softmax(2), v).unflatten(0, (-1, HEADS))
        return self.lin("proj", mixed.permute(2, 0, 1, 3).flatten(2), i)

    def think(self, i: int, x: Tensor) -> Tensor:
        x = self.lin("up", x, i)
        if self.fault == "last_denoising_layer_with_the_quick_gelu" and i == DEPTH - 1:
            return self.lin("down", x * torch.sigmoid(1.702 * x), i)
        return self.lin("down", x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), i)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, PATCH)
        side, half = x.shape[-1], len(self.w["tick"]) // 2
        x = self.lin("cut", x.flatten(2).permute(2, 0, 1))
        x = x + places(side, x).flatten(0, 1)[:, None]
        angles = t[:, None] * 10000 ** -(torch.arange(half).to(x) / half)
        ticks = F.silu(self.lin("tick", torch.cat([angles.cos(), angles.sin()], 1)))
        given = self.lin("tock", ticks) + self.labels[y]
        signal = F.silu(given)
        middle = given if self.fault == "middle_modulation_without_silu" else signal
        signals = torch.stack([signal, middle, signal])
        for i, rows in enumerate(torch.baddbmm(self.b["steer"][:, None], signals, self.w["steer"])):
            a, b, gate, c, d, last_gate = rows.chunk(6, 1)
            x = x + gate * self.attend(i, torch.addcmul(a, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + b))
            x = x + last_gate * self.think(i, torch.addcmul(c, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + d))
        shift, scale = self.lin("last", signal).chunk(2, 1)
        x = self.lin("end", torch.addcmul(shift, F.layer_norm(x, (WIDTH,), eps=1e-6), 1 + scale))
        x = x.unflatten(2, (PATCH * PATCH, -1)).permute(1, 3, 2, 0).flatten(1, 2)
        return F.pixel_shuffle(x.unflatten(2, (side, side)), PATCH)


FINAL, MIDDLE = "final_layer.adaLN_modulation", "blocks.1.adaLN_modulation"
LABEL = "y_embedder.embedding_table"
right(task, "diffusion_in_gated_branches", "branches with their own modulations", Painter)
right(task, "diffusion_in_one_pass", "stacked weights, tokens first", OnePass)
wrong(
    task,
    Painter,
    patch_pixels_listed_column_by_column=("pixels in the wrong order", ("x_embedder.proj", "x_embedder")),
    diffusion_clock_reaches_the_longest_period=("wrong frequencies", "t_embedder"),
    diffusion_null_label_learns_nothing=("row as padding", (LABEL, "y_embedder"), ("weight gradient",)),
    gated_branch_divides_by_the_unbiased_deviation=("unbiased variance", "blocks.1.norm2"),
    canvas_takes_the_scale_before_the_shift=("parts swapped", ("final_layer", FINAL, FINAL + ".1")),
)
wrong(
    task,
    OnePass,
    patch_scores_over_the_wrong_root=("wrong scale of the scores", "blocks.0.attn"),
    middle_modulation_without_silu=("activation missing", (MIDDLE + ".0", MIDDLE)),
    last_denoising_layer_with_the_quick_gelu=("another form of the activation", "blocks.2.mlp.act"),
)
