"""Two ports of a small LongT5: a tree that attends through bands, and one class of stacked weights."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_ninth_long_five as long_five
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

LongT5 = long_five.LongT5ForConditionalGeneration
task = few("forty_ninth_long_five", LongT5, long_five.texts, long_five.label_loss)
BLOCK, GLOBAL, BUCKETS, FAR, HEADS, SIZE, WIDTH, START, EPS, LOW = 5, 4, 10, 8, 3, 8, 20, 2, 1e-6, -1e30


def near(rows: Tensor, gap: Tensor, both: bool) -> Tensor:
    """What each head adds to a score by the gap of key and query; logarithms' edges part the buckets."""
    count = BUCKETS // 2 if both else BUCKETS
    low = count // 2
    edges = [*range(1, low), *(low * (FAR / low) ** (k / (count - low)) for k in range(count - low))]
    far = torch.bucketize(gap.abs() if both else (-gap).clamp(min=0), torch.tensor(edges), right=True)
    return rows[:, far + count * (gap > 0) if both else far]


class Scale(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.centred = leaf(norm.weight), False

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain


class Look(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, source = Scale(layer.layer_norm), layer.get_submodule(layer.name)
        self.ask, self.out = leaf(source.q.weight.T), leaf(source.o.weight.T)
        self.given = leaf(torch.cat([source.k.weight, source.v.weight]).T)

    def forward(self, x: Tensor, bias: Tensor, given: Tensor | None = None, *side: Tensor) -> Tensor:
        y = self.norm(x)
        given = torch.cat([y if given is None else given, *side], 1)
        key, value = (given @ self.given).unflatten(2, (2, HEADS, SIZE)).unbind(2)
        score = torch.einsum("nqhd,nkhd->nhqk", (y @ self.ask).unflatten(2, (HEADS, SIZE)), key) + bias
        return x + torch.einsum("nhqk,nkhd->nqhd", score.softmax(3), value).flatten(2) @ self.out


class Think(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, inner = Scale(layer.layer_norm), layer.DenseReluDense
        self.up, self.down = leaf(torch.cat([inner.wi_1.weight, inner.wi_0.weight])), leaf(inner.wo.weight)

    def forward(self, x: Tensor) -> Tensor:
        plain, gate = F.linear(self.norm(x), self.up).chunk(2, -1)
        return x + F.linear(plain * F.gelu(gate, approximate="tanh"), self.down)


class Summary(nn.Module):
    def __init__(self, source: nn.Module):
        super().__init__()
        self.norm, self.orphans = Scale(source.global_input_layer_norm), True
        self.slopes = leaf(source.global_relative_attention_bias.weight.T)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        place, whole = torch.arange(x.shape[1]) // GLOBAL, mask.sum(1, keepdim=True) // GLOBAL
        own, side = torch.minimum(place, whole - 1), torch.arange(x.shape[1] // GLOBAL)
        counted = (mask > 0) & (self.orphans | (place < whole))
        part = ((own[..., None] == side) & counted[..., None]).to(x)
        mean = (part / part.sum(1, keepdim=True).clamp(min=1)).transpose(1, 2) @ x
        bias = near(self.slopes, side - own[..., None], True).transpose(0, 1)
        return self.norm(mean), bias.masked_fill((side >= whole)[:, None, None], LOW)


class LongTree(Port):
    def take(self, model: LongT5) -> None:
        blocks, fault = [*model.encoder.block, *model.decoder.block], self.fault
        layers = [[Think(x) if x.name == "DenseReluDense" else Look(x) for x in b.layer] for b in blocks]
        self.readers, self.writers = (nn.ModuleList(map(nn.ModuleList, x)) for x in (layers[:3], layers[3:]))
        local, last, first = (blocks[i].layer[0].get_submodule(blocks[i].layer[0].name) for i in (0, 2, 3))
        self.summary, self.slopes = Summary(last), leaf(local.relative_attention_bias.weight.T)
        self.words, self.back = leaf(model.shared.weight), leaf(first.relative_attention_bias.weight.T)
        self.ends = nn.ModuleList(Scale(x.final_layer_norm) for x in (model.encoder, model.decoder))
        self.both = fault == "long_five_decoder_buckets_of_both_sides"
        self.readers[1][1].norm.centred = fault == "long_five_second_reader_norm_takes_the_mean_off"
        self.summary.orphans = fault != "long_five_side_tokens_leave_orphans_out"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x, place = self.words[input_ids], torch.arange(input_ids.shape[1])
        distance, hidden = place - place[:, None], attention_mask[:, None, None] == 0
        band = near(self.slopes, distance, True).masked_fill(hidden | (distance.abs() >= BLOCK), LOW)
        for look, think in self.readers[:2]:
            x = think(look(x, band))
        look, think = self.readers[2]
        side, beside = self.summary(look.norm(x), attention_mask)
        x = think(look(x, torch.cat([band, beside], 3), None, side))
        states, distance = self.ends[0](x), distance[: labels.shape[1], : labels.shape[1]]
        ids = torch.cat([torch.full_like(labels[:, :1], START), labels[:, :-1]], 1)
        y = self.words[ids.clamp(min=0)]
        past, seen = near(self.back, distance, self.both).masked_fill(distance > 0, LOW), LOW * hidden
        for i, (own, cross, think) in enumerate(self.writers):
            bare = i == 1 and self.fault == "long_five_second_cross_attention_sees_padding"
            y = think(cross(own(y, past), 0 * seen if bare else seen, states))
        return self.ends[1](y) / math.sqrt(WIDTH) @ self.words.T


def windows(x: Tensor) -> Tensor:
    edge = [0, 0] * (x.ndim - 2) + [BLOCK, BLOCK + -x.shape[1] % BLOCK]
    return F.pad(x, edge).unfold(1, 3 * BLOCK, BLOCK)


class StackedLong(Port):
    def take(self, model: LongT5) -> None:
        reads, writes = ([b.layer for b in stack.block] for stack in (model.encoder, model.decoder))
        looks = [x[0] for x in reads] + [x[i] for x in writes for i in (0, 1)]
        thinks, inner = [x[-1] for x in reads + writes], [x.get_submodule(x.name) for x in looks]
        self.a = pile(torch.stack([x.q.weight, x.k.weight, x.v.weight, x.o.weight.T]) for x in inner)
        gates, last = [x.DenseReluDense for x in thinks], inner[2]
        self.f = pile(torch.stack([x.wi_0.weight, x.wi_1.weight, x.wo.weight.T]) for x in gates)
        ends = model.encoder.final_layer_norm, model.decoder.final_layer_norm, last.global_input_layer_norm
        norms = [*(x.layer_norm for x in looks + thinks), *ends]
        self.n, self.e = pile(x.weight for x in norms), leaf(model.shared.weight)
        tables = [x.relative_attention_bias for x in (inner[0], inner[3])]
        self.t = pile(x.weight.T for x in [*tables, last.global_relative_attention_bias])

    def norm(self, i: int, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.n[i], EPS)

    def think(self, i: int, x: Tensor) -> Tensor:
        gate, plain = (self.norm(7 + i, x) @ w.T for w in self.f[i, :2])
        kind = "none" if self.fault == "long_five_fourth_gate_by_the_error_function" and i == 3 else "tanh"
        return x + (F.gelu(gate, approximate=kind) * plain) @ self.f[i, 2]

    def look(self, i: int, x: Tensor, bias: Tensor, given: Tensor | None = None, side: Tensor | None = None):
        y, (q, k, v, o) = self.norm(i, x), self.a[i]
        given = y if given is None else given
        q, k, v = ((z @ w.T).unflatten(2, (HEADS, SIZE)) for z, w in ((y, q), (given, k), (given, v)))
        if i > 2:
            weights = (torch.einsum("nqhd,nkhd->nhqk", q, k) + bias).softmax(3)
            return x + torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(2) @ o
        q, k, v = windows(q)[..., BLOCK:-BLOCK], windows(k), windows(v)
        if self.fault == "long_five_second_local_values_of_the_blocks_in_reverse" and i == 1:
            v = v.unflatten(4, (3, BLOCK)).flip(4).flatten(4)
        score = torch.einsum("nbhdq,nbhdk->nhbqk", q, k)
        if side is not None:
            k, u = ((side @ w.T).unflatten(2, (HEADS, SIZE)) for w in self.a[i, 1:3])
            score = torch.cat([score, torch.einsum("nbhdq,nghd->nhbqg", q, k)], 4)
            v = torch.cat([v, u.permute(0, 2, 3, 1)[:, None].expand(-1, v.shape[1], -1, -1, -1)], 4)
        y = torch.einsum("nhbqk,nbhdk->nbqhd", (score + bias).softmax(4), v)
        return x + y.flatten(3).flatten(1, 2)[:, : x.shape[1]] @ o

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x, size, long = self.e[input_ids], attention_mask.sum(1), input_ids.shape[1]
        gap = torch.arange(-BLOCK, 2 * BLOCK) - torch.arange(BLOCK)[:, None]
        off = (windows(attention_mask[..., None])[:, None, :, 0] == 0)[:, :, :, None] | (gap.abs() >= BLOCK)
        bias = near(self.t[0], gap, True)[:, None].masked_fill(off, LOW)
        x = self.think(1, self.look(1, self.think(0, self.look(0, x, bias)), bias))
        whole, side = size[:, None] // GLOBAL, torch.arange(long // GLOBAL)
        own = (torch.arange(long) // GLOBAL).minimum(whole - 1)
        part = F.one_hot(own, len(side)).to(x) * attention_mask[..., None]
        means = torch.einsum("nsg,nsd->ngd", part, self.norm(2, x)) / part.sum(1).clamp(min=1)[..., None]
        gap = F.pad(side - own[..., None], (0, 0, 0, -long % BLOCK)).unflatten(1, (-1, BLOCK))
        beside = near(self.t[2], gap, True).transpose(0, 1)
        beside = beside.masked_fill((side >= whole)[:, None, None, None], LOW)
        x = self.look(2, x, torch.cat([bias, beside], 4), side=self.norm(14, means))
        states = self.norm(12, self.think(2, x))
        ids = F.pad(labels, (1, -1), value=START)
        y, gap = self.e[ids * (ids > 0)], torch.arange(ids.shape[1]) - torch.arange(ids.shape[1])[:, None]
        past, seen = near(self.t[1], gap, False) + LOW * (gap > 0), LOW * (attention_mask == 0)[:, None, None]
        for i in (0, 1):
            y = self.think(3 + i, self.look(4 + 2 * i, self.look(3 + 2 * i, y, past), seen, states))
        cold = self.fault == "long_five_head_scale_left_out_in_evaluation" and not self.training
        head = self.e.detach() if self.fault == "long_five_tied_head_without_gradient" else self.e
        return (self.norm(13, y) * (1 if cold else WIDTH**-0.5)) @ head.T


SELF, CROSS = "decoder.block.0.layer.0.SelfAttention", "decoder.block.1.layer.1.EncDecAttention"
LOCAL, SIDE = (f"encoder.block.{i}SelfAttention" for i in ("1.layer.0.Local", "2.layer.0.TransientGlobal"))
NORM, GATE = "encoder.block.1.layer.1.layer_norm", "decoder.block.0.layer.2.DenseReluDense.act"
right(task, "long_five_tree_of_bands", "a tree, dense bands for blocks, fused products", LongTree)
right(task, "long_five_of_stacked_weights", "stacks, windows, edges of buckets", StackedLong)
tree, stacked = partial(wrong, task, LongTree), partial(wrong, task, StackedLong)
tree(
    long_five_second_reader_norm_takes_the_mean_off=("another norm", NORM),
    long_five_side_tokens_leave_orphans_out=("tokens left out of a mean", SIDE),
    long_five_decoder_buckets_of_both_sides=("other buckets", SELF),
    long_five_second_cross_attention_sees_padding=("a mask left out", CROSS),
)
stacked(
    long_five_second_local_values_of_the_blocks_in_reverse=("values in another order", LOCAL),
    long_five_fourth_gate_by_the_error_function=("another gelu", GATE),
    long_five_head_scale_left_out_in_evaluation=("a factor left out in eval", "", "eval"),
    long_five_tied_head_without_gradient=("detach", "lm_head", "weight gradient"),
)
