"""A port of a small Chronos-Bolt: a tree with the patches first."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_eighth_chronos import (
    HEAD,
    HEADS,
    HORIZON,
    PATCH,
    QUANTILES,
    ChronosBolt,
    quantile_losses,
    seasons,
)

task = few("twenty_eighth_chronos", ChronosBolt, seasons, quantile_losses)


class Gauge(nn.Module):
    """Where a series lies and how wide it is, of what is seen of it."""

    def __init__(self, fewer: int):
        super().__init__()
        self.fewer = fewer

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        count = seen.sum(1, True)
        middle = (x * seen).sum(1, True) / count
        power = ((x - middle) * seen).pow(2).sum(1, True) / (count - self.fewer)
        return middle, power.sqrt()


class TwoWays(nn.Module):
    """A hidden layer and a skip in one product, then the hidden half through a second one."""

    def __init__(self, block: nn.Module):
        super().__init__()
        hidden, skip, last = block.hidden_layer, block.residual_layer, block.output_layer
        self.size = len(hidden.weight)
        self.w = leaf(torch.cat([hidden.weight, skip.weight]).T)
        self.b = leaf(torch.cat([hidden.bias, skip.bias]))
        self.u, self.c = leaf(last.weight.T), leaf(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w + self.b
        return y[..., : self.size].clamp(min=0) @ self.u + y[..., self.size :] + self.c


class Root(nn.Module):
    """A norm by the length of the vector."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain = leaf(norm.weight)
        self.floor = norm.variance_epsilon * len(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * (x.shape[-1] / ((x * x).sum(-1, True) + self.floor)).sqrt()


class Mix(nn.Module):
    """Attention over [T, N, D]; keys that are out get minus infinity."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        a = layer.SelfAttention if hasattr(layer, "SelfAttention") else layer.EncDecAttention
        self.root, self.divide, self.fixed = Root(layer.layer_norm), False, False
        self.ask = leaf(a.q.weight.T.unflatten(1, (HEADS, HEAD)))
        self.tell = pile(x.weight.T.unflatten(1, (HEADS, HEAD)) for x in (a.k, a.v))
        self.out = leaf(a.o.weight.T.unflatten(0, (HEADS, HEAD)))

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.root(x)
        source = y if memory is None else memory.detach() if self.fixed else memory
        q = torch.einsum("tnd,dhk->tnhk", y, self.ask)
        k, v = torch.einsum("snd,pdhk->psnhk", source, self.tell)
        scores = torch.einsum("tnhk,snhk->nhts", q, k) / (math.sqrt(HEAD) if self.divide else 1) + bias
        mixed = torch.einsum("nhts,snhk->tnhk", scores.softmax(3), v)
        return x + torch.einsum("tnhk,hkd->tnd", mixed, self.out)


class Widen(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.root = Root(layer.layer_norm)
        self.up, self.down = (leaf(x.weight.T) for x in (layer.DenseReluDense.wi, layer.DenseReluDense.wo))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.root(x) @ self.up).relu() @ self.down


def steps(stack: nn.Module) -> nn.ModuleList:
    layers = [layer for block in stack.block for layer in block.layer]
    return nn.ModuleList(Widen(x) if hasattr(x, "DenseReluDense") else Mix(x) for x in layers)


def places(count: int) -> list[list[int]]:
    """The row of the table for each query and key: distances 0, 1, 2, 3, 4 or 5, and more."""
    near = [0, 1, 2, 3, 4, 4] + [5] * count
    return [[near[abs(j - i)] + 6 * (j > i) for j in range(count)] for i in range(count)]


class PatchesFirst(Port):
    """A flat list of steps for each side over [T, N, D], with fused products."""

    def take(self, model: ChronosBolt) -> None:
        fault = self.fault
        self.gauge = Gauge(int(fault == "chronos_deviation_of_one_degree_of_freedom_fewer"))
        self.stem, self.head = TwoWays(model.input_patch_embedding), TwoWays(model.output_patch_embedding)
        self.start, self.mark = map(leaf, model.shared.weight)
        self.read, self.write = steps(model.encoder), steps(model.decoder)
        self.tables = nn.ParameterList(
            leaf(x.block[0].layer[0].SelfAttention.relative_attention_bias.weight.T)
            for x in (model.encoder, model.decoder)
        )
        self.ends = nn.ModuleList(Root(x.final_layer_norm) for x in (model.encoder, model.decoder))
        self.read[2].divide = fault == "chronos_second_encoder_scores_divided_by_the_root_of_their_size"
        self.write[4].fixed = fault == "chronos_second_cross_attention_takes_its_memory_for_a_constant"

    def forward(self, context: Tensor, target: Tensor, target_mask: Tensor) -> dict[str, Tensor]:
        seen = context == context
        x = context.masked_fill(~seen, 0)
        middle, width = self.gauge(x, seen)
        x, short = (x - middle) / width * seen, -x.shape[1] % PATCH
        cut = [F.pad(y, (short, 0)).unflatten(1, (-1, PATCH)).transpose(0, 1) for y in (x, seen.to(x))]
        x = self.stem(torch.cat(cut, 2))
        x = torch.cat([x, self.mark.expand(1, x.shape[1], -1)])
        gone = F.pad(cut[1].amax(2) == 0, (0, 0, 0, 1)).T[:, None, None]
        out = torch.zeros_like(gone, dtype=x.dtype).masked_fill(gone, -math.inf)
        bias = self.tables[0][:, places(len(x))] + out
        for step in self.read:
            x = step(x, bias) if isinstance(step, Mix) else step(x)
        memory, y = self.ends[0](x), self.start.expand(1, x.shape[1], -1)
        for own, cross, widen in zip(*(self.write[i::3] for i in range(3)), strict=True):
            y = widen(cross(own(y, self.tables[1][:, :1, None]), out, memory))
        y = self.head(self.ends[1](y)[0]).unflatten(1, (-1, HORIZON))
        miss = ((target - middle) / width)[:, None] - y
        levels = torch.tensor(QUANTILES).to(y)[:, None]
        loss = torch.maximum(levels * miss, (levels - 1) * miss) * target_mask[:, None]
        y = middle[..., None] + width[..., None] * y
        if self.fault == "chronos_quantiles_sorted_in_evaluation" and not self.training:
            y = y.sort(1).values
        return {"quantile_preds": y, "loss": loss.sum() * 2 / (len(y) * len(QUANTILES))}


SLOPES = ("input gradient", "weight gradient")
right(task, "chronos_of_patches_first", "a tree, fused products, patches first", PatchesFirst)
wrong(
    task,
    PatchesFirst,
    chronos_deviation_of_one_degree_of_freedom_fewer=("an unbiased variance", "instance_norm"),
    chronos_second_encoder_scores_divided_by_the_root_of_their_size=(
        "a scale too many",
        "encoder.block.1.layer.0.SelfAttention",
    ),
    chronos_second_cross_attention_takes_its_memory_for_a_constant=(
        "detach",
        "decoder.block.1.layer.1.EncDecAttention",
        SLOPES,
    ),
    chronos_quantiles_sorted_in_evaluation=("an order in eval", "", "eval"),
)
