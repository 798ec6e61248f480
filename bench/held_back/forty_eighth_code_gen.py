"""Two ports of a small CodeGen: a tree of heads with complex rotations, and flat code of fused products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_eighth_code_gen import (
    HEADS,
    INNER,
    LAYERS,
    PARTS,
    ROTARY,
    SIZE,
    WIDTH,
    CodeGenForCausalLM,
    counted,
    next_token,
)
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_eighth_code_gen", CodeGenForCausalLM, counted, next_token)


def by_head(weight: Tensor, blocks: int = PARTS) -> Tensor:
    """A fused weight [3 D, D] as queries, values and keys, [3, heads, D / heads, D]."""
    return weight.unflatten(0, (blocks, 3, -1)).transpose(0, 1).reshape(3, HEADS, SIZE, WIDTH)


class Affine(nn.Module):
    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.matrix, self.offset = leaf(layer.weight.T), leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, 1), self.matrix).unflatten(0, x.shape[:2])


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.gain + self.shift


class Heads(nn.Module):
    """Attention of [T, N, D] with weights by head; pairs of features are complex numbers."""

    def __init__(self, attn: nn.Module, blocks: int):
        super().__init__()
        self.ask, self.give, self.tell = map(leaf, by_head(attn.qkv_proj.weight, blocks))
        self.back, self.silent = leaf(attn.out_proj.weight.T.unflatten(0, (HEADS, SIZE))), False

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x[..., :ROTARY].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(pairs * turns).flatten(-2), x[..., ROTARY:]], -1)

    def forward(self, x: Tensor, turns: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (torch.einsum("tne,hde->nhtd", x, w) for w in (self.ask, self.tell, self.give))
        q, k = self.turn(q, turns), self.turn(k, turns)
        if self.silent:
            k = k.detach()
        shares = torch.softmax(SIZE**-0.5 * q @ k.mT + hidden, -1)
        return torch.einsum("nhts,nhsd,hde->tne", shares, v, self.back)


class Layer(nn.Module):
    def __init__(self, block: nn.Module, blocks: int):
        super().__init__()
        self.norm, self.heads = Standard(block.ln_1), Heads(block.attn, blocks)
        self.feed = nn.Sequential(Affine(block.mlp.fc_in), nn.GELU("tanh"), Affine(block.mlp.fc_out))
        self.serial = False

    def forward(self, x: Tensor, turns: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.heads(y, turns, hidden)
        return x + self.feed(self.norm(x) if self.serial else y)


class DecoderOfHeads(Port):
    """Layers of [T, N, D], in which each of the two branches adds to the stream by itself."""

    def take(self, model: CodeGenForCausalLM) -> None:
        body, fault = model.transformer, self.fault
        whole = fault == "code_gen_first_layer_takes_its_fused_weight_in_one_block"
        self.words = leaf(body.wte.weight)
        self.layers = nn.ModuleList(Layer(x, 1 if whole and i == 0 else PARTS) for i, x in enumerate(body.h))
        self.layers[1].heads.silent = fault == "code_gen_second_layer_keys_without_gradient"
        self.layers[2].serial = fault == "code_gen_last_layer_runs_its_mlp_after_its_attention"
        self.end = nn.Sequential(Standard(body.ln_f), Affine(model.lm_head))
        self.register_buffer("angles", body.h[0].attn.embed_positions.clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x = self.words[input_ids.T]
        sin, cos = self.angles[position_ids][:, None].chunk(2, -1)
        seen = attention_mask[:, None, None].bool()
        if self.fault == "code_gen_padding_seen_in_evaluation" and not self.training:
            seen = torch.ones_like(seen)
        seen = seen & torch.ones_like(seen[0, 0, 0]).expand(len(x), -1).tril()
        hidden = (~seen).to(x.dtype) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, torch.complex(cos, sin), hidden)
        return self.end(x).transpose(0, 1)


def halved(weight: Tensor) -> Tensor:
    """Rows by head in the order in which the rotated pairs are two halves."""
    return torch.cat([weight[:, 0:ROTARY:2], weight[:, 1:ROTARY:2], weight[:, ROTARY:]], 1)


class FlatDecoder(Port):
    """One product into and one out of both branches of a layer; rotations of sorted halves."""

    def take(self, model: CodeGenForCausalLM) -> None:
        body, rows = model.transformer, []
        for i, block in enumerate(body.h):
            q, v, k = by_head(block.attn.qkv_proj.weight)
            if i != 1 or self.fault != "code_gen_second_layer_rotates_halves_of_unsorted_rows":
                q, k = halved(q), halved(k)
            rows.append(torch.cat([x.reshape(-1, WIDTH) for x in (q, k, v, block.mlp.fc_in.weight)]))
        self.enter = pile(rows)
        self.leave = pile(torch.cat([x.attn.out_proj.weight, x.mlp.fc_out.weight], 1) for x in body.h)
        self.bend = pile(x.mlp.fc_in.bias for x in body.h)
        self.lift = pile(x.mlp.fc_out.bias for x in body.h)
        norms = [*(x.ln_1 for x in body.h), body.ln_f]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        ends = (body.wte.weight, model.lm_head.weight, model.lm_head.bias[:, None])
        self.words = leaf(torch.cat(ends, 1))
        self.register_buffer("angles", body.h[0].attn.embed_positions.clone())

    def norm(self, i: int, x: Tensor) -> Tensor:
        less = i == LAYERS and self.fault == "code_gen_last_norm_by_sample_variance"
        spread, center = torch.var_mean(x, -1, correction=int(less), keepdim=True)
        gain, shift = self.norms[i]
        return torch.addcmul(shift, (x - center) * (spread + 1e-5).rsqrt(), gain)

    def curve(self, i: int, x: Tensor) -> Tensor:
        if i == 0 and self.fault == "code_gen_first_mlp_by_the_quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * x * (1 + 0.044715 * x * x))

    def layer(self, i: int, x: Tensor, sin: Tensor, cos: Tensor, hidden: Tensor) -> Tensor:
        *qkv, up = (self.norm(i, x) @ self.enter[i].T).split([WIDTH, WIDTH, WIDTH, INNER], -1)
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)) for part in qkv)
        q = q / SIZE**0.5
        turned = []
        for part in (q, k):
            one, two, rest = part.tensor_split((ROTARY // 2, ROTARY), -1)
            turned.append(torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1))
        scores = torch.einsum("nihd,njhd->nhij", *turned) + hidden
        power = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = torch.einsum("nhij,njhd->nihd", power / power.sum(-1, keepdim=True), v).flatten(2)
        bend = self.bend[i]
        if i == LAYERS - 1 and self.fault == "code_gen_last_mlp_first_bias_is_constant":
            bend = bend.detach()
        both = torch.cat([mixed, self.curve(i, up + bend)], -1)
        return x + both @ self.leave[i].T + self.lift[i]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        words, head, offset = self.words.split([WIDTH, WIDTH, 1], 1)
        x = F.one_hot(input_ids, len(words)).to(words) @ words
        sin, cos = self.angles[position_ids][:, :, None].chunk(2, -1)
        order = torch.arange(x.shape[1], device=x.device)
        unseen = (order[:, None] < order) | (attention_mask == 0)[:, None, None]
        hidden = torch.where(unseen, torch.finfo(x.dtype).min, x.new_zeros(()))
        for i in range(LAYERS):
            x = self.layer(i, x, sin, cos, hidden)
        return self.norm(LAYERS, x) @ head.T + offset[:, 0]


SLOPES = ("input gradient", "weight gradient")
FIRST = ("transformer.h.0.attn", "transformer.h.0.attn.qkv_proj")
right(task, "code_gen_of_heads_and_complex_turns", "a tree, time first, weights by head", DecoderOfHeads)
right(task, "code_gen_of_two_products_a_layer", "packed stacks, sorted rows, fused branches", FlatDecoder)
wrong(
    task,
    DecoderOfHeads,
    code_gen_padding_seen_in_evaluation=("a mask left out in eval", "transformer", "eval"),
    code_gen_first_layer_takes_its_fused_weight_in_one_block=("another order of a fused weight", FIRST),
    code_gen_second_layer_keys_without_gradient=("detach", "transformer.h.1.attn", SLOPES),
    code_gen_last_layer_runs_its_mlp_after_its_attention=("branches in series", "transformer.h.2"),
)
wrong(
    task,
    FlatDecoder,
    code_gen_first_mlp_by_the_quick_gelu=("another activation", "transformer.h.0.mlp.act"),
    code_gen_second_layer_rotates_halves_of_unsorted_rows=("other pairs rotated", "transformer.h.1.attn"),
    code_gen_last_norm_by_sample_variance=("another variance", "transformer.ln_f"),
    code_gen_last_mlp_first_bias_is_constant=("detach", "transformer.h.2.mlp.fc_in", "weight gradient"),
)
