"""Two ports of a small GPT-Neo: a tree of residual branches, time first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fifth_gpt_neo import (
    HEADS,
    LAYERS,
    VOCAB,
    WINDOW,
    GPTNeoForCausalLM,
    next_token,
    progressions,
)
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fifth_gpt_neo", GPTNeoForCausalLM, progressions, next_token)
FAR = -1e30


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return torch.addcmul(
            self.offset, self.gain, x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        )


class Looking(nn.Module):
    """A residual branch: [T, N, C] looks back over ``reach`` steps, or over all of them."""

    def __init__(self, norm: nn.LayerNorm, layer: nn.Module, reach: int):
        super().__init__()
        self.norm, self.reach, self.scale = Standard(norm), reach, 1.0
        self.three = leaf(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
        self.join, self.offset = leaf(layer.out_proj.weight), leaf(layer.out_proj.bias)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        time = torch.arange(len(x), device=x.device)
        back = time[:, None] - time
        seen = (back >= 0) & (back < self.reach) & real[:, None, None]
        bias = torch.zeros(seen.shape).to(x).masked_fill(~seen, FAR)
        three = F.linear(self.norm(x), self.three).unflatten(2, (3, HEADS, -1))
        q, k, v = three.permute(2, 1, 3, 0, 4)
        y = F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
        return x + F.linear(y.permute(2, 0, 1, 3).flatten(2), self.join, self.offset)


class Swell(nn.Module):
    """x times a gate, the logistic form of the hyperbolic tangent's gelu."""

    def __init__(self):
        super().__init__()
        self.fixed, self.exact = False, False

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return F.gelu(x)
        gate = torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))
        return x * (gate.detach() if self.fixed else gate)


class Thinking(nn.Sequential):
    def __init__(self, norm: nn.LayerNorm, mlp: nn.Module):
        up, down = nn.Linear(*mlp.c_fc.weight.T.shape), nn.Linear(*mlp.c_proj.weight.T.shape)
        up.load_state_dict(mlp.c_fc.state_dict()), down.load_state_dict(mlp.c_proj.state_dict())
        super().__init__(Standard(norm), up, Swell(), down)
        self.to(norm.weight)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return x + super().forward(x)


class NeoOfBranches(Port):
    """Residual branches that hold their norms; time comes first, and the attention is torch's own."""

    def take(self, model: GPTNeoForCausalLM) -> None:
        body, fault = model.transformer, self.fault
        self.words, self.places = leaf(body.wte.weight), leaf(body.wpe.weight)
        self.branches, self.finish = nn.ModuleList(), Standard(body.ln_f)
        for kind, block in zip(LAYERS, body.h, strict=True):
            reach = WINDOW if kind == "local" else len(self.places)
            self.branches.append(Looking(block.ln_1, block.attn.attention, reach))
            self.branches.append(Thinking(block.ln_2, block.mlp))
        self.branches[1][2].fixed = fault == "gpt_neo_first_gelu_holds_its_gate_constant_backwards"
        self.branches[3][2].exact = fault == "gpt_neo_second_gelu_is_the_exact_one"
        if fault == "gpt_neo_third_attention_scaled_by_the_root_of_its_width":
            self.branches[4].scale = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.bool()
        place = torch.where(real, attention_mask.cumsum(1) - 1, 1)
        if self.fault == "gpt_neo_positions_count_the_padding":
            place = torch.arange(real.shape[1]).expand_as(real)
        x = self.words[input_ids.T] + self.places[place.T]
        for branch in self.branches:
            x = branch(x, real)
        return torch.einsum("tnc,vc->ntv", self.finish(x), self.words)


class StackedNeo(Port):
    """Stacks by layer of transposed weights, rows of vectors, and one table of words and places."""

    def take(self, model: GPTNeoForCausalLM) -> None:
        body = model.transformer
        looks, minds = [b.attn.attention for b in body.h], [b.mlp for b in body.h]
        squares = ([a.v_proj, a.q_proj, a.out_proj, a.k_proj] for a in looks)
        self.square = pile(torch.stack([x.weight.T for x in four]) for four in squares)
        self.up, self.down = pile(m.c_fc.weight.T for m in minds), pile(m.c_proj.weight.T for m in minds)
        self.bend = pile(m.c_fc.bias for m in minds)
        ends = ((b.attn.attention.out_proj.bias, b.mlp.c_proj.bias) for b in body.h)
        self.shift = pile(map(torch.stack, ends))
        norms = [x for b in body.h for x in (b.ln_1, b.ln_2)] + [body.ln_f]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.table = leaf(torch.cat([body.wte.weight, body.wpe.weight]))

    def norm(self, i: int, x: Tensor) -> Tensor:
        last = i == len(self.norms) - 1
        less = 1 if last and self.fault == "gpt_neo_final_norm_divides_by_one_channel_fewer" else 0
        spread, middle = torch.var_mean(x, -1, correction=less, keepdim=True)
        return (x - middle) / (spread + 1e-5).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def look(self, i: int, x: Tensor, wall: Tensor) -> Tensor:
        v, q, out, k = self.square[i]
        width = x.shape[-1] // HEADS
        heads = []
        for head in range(HEADS):
            own = slice(head * width, (head + 1) * width)
            score = torch.baddbmm(wall, x @ q[:, own], (x @ k[:, own]).mT)
            score = (score - score.amax(-1, keepdim=True)).exp()
            heads.append(score @ (x @ v[:, own]) / score.sum(-1, keepdim=True))
        mixed = i == 1 and self.fault == "gpt_neo_second_attention_merges_its_heads_channel_by_channel"
        y = torch.stack(heads, -1).flatten(2) if mixed else torch.cat(heads, -1)
        return y @ out + self.shift[i, 0]

    def think(self, i: int, x: Tensor) -> Tensor:
        x = x @ self.up[i] + self.bend[i]
        return F.gelu(x, approximate="tanh") @ self.down[i] + self.shift[i, 1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words, places = self.table[:VOCAB], self.table[VOCAB:]
        if self.fault == "gpt_neo_places_are_constants":
            places = places.detach()
        there = attention_mask.to(words)
        place = ((there.cumsum(1) - 1) * there + 1 - there).long()
        x, size = F.embedding(input_ids, words) + F.embedding(place, places), input_ids.shape[1]
        full = torch.ones(size, size).to(x)
        whole = full.tril() * there[:, None]
        band = whole * full.triu(1 - WINDOW)
        for i, kind in enumerate(LAYERS):
            near = kind == "local"
            if i == 3 and self.fault == "gpt_neo_last_attention_is_global_in_evaluation":
                near = self.training
            x = x + self.look(i, self.norm(2 * i, x), FAR * (1 - (band if near else whole)))
            x = x + self.think(i, self.norm(2 * i + 1, x))
        return self.norm(2 * len(LAYERS), x) @ words.T


SLOPES, LOOK = ("input gradient", "weight gradient"), "transformer.h.{}.attn.attention"
right(task, "gpt_neo_of_branches_with_time_first", "a tree, fused products, a logistic gelu", NeoOfBranches)
right(task, "gpt_neo_of_stacked_weights", "transposed stacks, head by head, one table", StackedNeo)
wrong(
    task,
    NeoOfBranches,
    gpt_neo_positions_count_the_padding=("positions from the wrong start", "transformer"),
    gpt_neo_first_gelu_holds_its_gate_constant_backwards=("detach", "transformer.h.0.mlp.act", SLOPES),
    gpt_neo_second_gelu_is_the_exact_one=("another activation", "transformer.h.1.mlp.act"),
    gpt_neo_third_attention_scaled_by_the_root_of_its_width=("a scale too many", LOOK.format(2)),
)
wrong(
    task,
    StackedNeo,
    gpt_neo_places_are_constants=("detach", "transformer.wpe", "weight gradient"),
    gpt_neo_second_attention_merges_its_heads_channel_by_channel=("another channel order", LOOK.format(1)),
    gpt_neo_last_attention_is_global_in_evaluation=("a mask left out in eval", LOOK.format(3), "eval"),
    gpt_neo_final_norm_divides_by_one_channel_fewer=("an unbiased variance", "transformer.ln_f"),
)
