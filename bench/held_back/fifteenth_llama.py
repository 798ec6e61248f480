"""Two ports of a Llama: time first with fused weights and a carried stream, and stacks with running sums."""

import torch
from torch import Tensor, nn

from bench.held_back._fifteenth_llama import EPS, GROUPS, HEADS, WIDTH, LlamaForCausalLM, next_token, texts
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_llama", LlamaForCausalLM, texts, next_token)
SHARED, SIZE, TILE = HEADS // GROUPS, WIDTH // HEADS, 5


class AddNorm(nn.Module):
    """Adds to the stream and gives it back, with its norm."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps, self.outside = leaf(norm.weight), norm.variance_epsilon, False

    def forward(self, delta: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stream = delta if stream is None else stream + delta
        power = torch.linalg.vecdot(stream, stream) / stream.shape[-1]
        root = power.sqrt() + self.eps if self.outside else (power + self.eps).sqrt()
        return stream / root[..., None] * self.gain, stream


class Mixer(nn.Module):
    """Attention of [T, B, C]; each group's queries lie beside its key and its value in one weight."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.tiled, self.quick, self.scale = False, False, attention.scaling
        three = attention.q_proj, attention.k_proj, attention.v_proj
        rows = torch.cat([x.weight.unflatten(0, (GROUPS, -1)) for x in three], 1)
        self.c_attn, self.c_proj = leaf(rows.flatten(0, 1).T), leaf(attention.o_proj.weight.T)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        front, back = x.tensor_split(2, -1)
        return torch.cat([front * cos - back * sin, torch.addcmul(back * cos, front, sin)], -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        time, texts = x.shape[:2]
        heads = (x @ self.c_attn).view(time, texts, GROUPS, SHARED + 2, SIZE)
        q, k = self.turned(heads[..., :-1, :], cos, sin).split([SHARED, 1], 3)
        pair = k[..., 0, :], heads[..., -1, :]
        k, v = (x.repeat(1, 1, SHARED, 1) if self.tiled else x.repeat_interleave(SHARED, 2) for x in pair)
        q, k, v = (y.reshape(time, texts * HEADS, SIZE).transpose(0, 1) for y in (q.flatten(2, 3), k, v))
        if self.quick and not self.training:
            bias = torch.full_like(bias, torch.finfo(bias.dtype).min).triu(1)
        scores = torch.baddbmm(bias.repeat_interleave(HEADS, 0), q, k.mT, alpha=self.scale)
        return torch.bmm(scores.softmax(-1), v).transpose(0, 1).reshape(time, texts, -1) @ self.c_proj


class SwiGLU(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        both = torch.cat([mlp.up_proj.weight, mlp.gate_proj.weight])
        self.w12, self.w3 = leaf(both.T), leaf(mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        straight, bent = (x @ self.w12).chunk(2, -1)
        return (straight * bent * bent.sigmoid()) @ self.w3.T


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ln_1, self.ln_2 = AddNorm(layer.input_layernorm), AddNorm(layer.post_attention_layernorm)
        self.attn, self.ffn, self.around_norm = Mixer(layer.self_attn), SwiGLU(layer.mlp), True

    def forward(self, delta: Tensor, stream: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
        x, stream = self.ln_1(delta, stream)
        x, stream = self.ln_2(self.attn(x, *rest), stream if self.around_norm else x)
        return self.ffn(x), stream


class TimeFirstLlama(Port):
    """[T, B, C]; every norm takes in what the layer before it has to add."""

    def take(self, model: LlamaForCausalLM) -> None:
        inner = model.model
        counted = self.fault == "llama_token_gradients_divided_by_how_often_they_occur"
        table = inner.embed_tokens.weight.detach().clone()
        self.wte = nn.Embedding.from_pretrained(table, freeze=False, scale_grad_by_freq=counted)
        self.h = nn.ModuleList(Block(layer) for layer in inner.layers)
        self.ln_f, self.head = AddNorm(inner.norm), leaf(model.lm_head.weight.T)
        self.register_buffer("rates", inner.rotary_emb.inv_freq.clone())
        a, b, c = self.h
        a.ln_1.outside = self.fault == "llama_first_norm_adds_epsilon_to_the_root"
        a.attn.quick = self.fault == "llama_first_attention_ignores_the_padding_in_evaluation"
        b.around_norm = self.fault != "llama_middle_block_carries_its_normed_state_around_attention"
        c.attn.tiled = self.fault == "llama_last_block_tiles_its_key_and_value_heads"

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        angles = torch.einsum("bt,f->tbf", positions.to(self.rates), self.rates)[:, :, None, None]
        delta, stream, order = self.wte(ids.T), None, torch.arange(ids.shape[1], device=ids.device)
        hidden = (order > order[:, None]) | (mask == 0)[:, None]
        bias = hidden.to(delta.dtype) * torch.finfo(delta.dtype).min
        for block in self.h:
            delta, stream = block(delta, stream, angles.cos(), angles.sin(), bias)
        return (self.ln_f(delta, stream)[0] @ self.head).transpose(0, 1)


class Gated(torch.autograd.Function):
    """The gated product; keeps only its two factors for the way back."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, slip: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.slip = slip
        return gate * gate.sigmoid() * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        slope = share * (1 + gate) * (1 - share) if ctx.slip else share * (1 + gate * (1 - share))
        return grad * up * slope, grad * gate * share, None


def paired(weight: Tensor, heads: int) -> Tensor:
    """Rows in halves -> rows in pairs, [D, G, heads of a group, pairs, 2]."""
    pairs = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return pairs.T.unflatten(1, (GROUPS, -1, SIZE // 2, 2))


class StackedLlama(Port):
    """Weights of all blocks in stacks, pairs turned by matrices, shares by running sums over the keys."""

    def take(self, model: LlamaForCausalLM) -> None:
        inner = model.model
        mixers, mlps = [x.self_attn for x in inner.layers], [x.mlp for x in inner.layers]
        three = inner.embed_tokens, model.lm_head, inner.norm
        self.table, self.head, self.last = (leaf(x.weight) for x in three)
        norms = [(x.input_layernorm, x.post_attention_layernorm) for x in inner.layers]
        self.gains = pile(torch.stack([a.weight, b.weight]) for a, b in norms)
        alone = self.fault == "llama_middle_keys_paired_as_if_there_were_no_groups"
        counts = [GROUPS, HEADS if alone else GROUPS, GROUPS]
        self.q = pile(paired(x.q_proj.weight, HEADS) for x in mixers)
        self.k = pile(paired(x.k_proj.weight, n) for x, n in zip(mixers, counts, strict=True))
        self.v = pile(x.v_proj.weight.unflatten(0, (GROUPS, -1)) for x in mixers)
        self.o = pile(x.o_proj.weight.T.unflatten(0, (GROUPS, SHARED, -1)) for x in mixers)
        self.inner = pile(torch.stack([x.gate_proj.weight, x.up_proj.weight]) for x in mlps)
        self.outer = pile(x.down_proj.weight.T for x in mlps)
        self.register_buffer("rates", inner.rotary_emb.inv_freq.clone())

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return torch.einsum("btd,bt,d->btd", x, (x.pow(2).mean(-1) + EPS).rsqrt(), gain)

    def turns(self, positions: Tensor) -> Tensor:
        if self.fault == "llama_angles_of_the_first_text_serve_the_whole_batch":
            positions = positions[:1].expand_as(positions)
        c, s = (wave(positions.unsqueeze(-1) * self.rates) for wave in (torch.cos, torch.sin))
        return torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2))

    def attend(self, i: int, x: Tensor, turns: Tensor, seen: Tensor) -> Tensor:
        q, k = (torch.einsum("btd,dgrfj,btfij->btgrfi", x, w[i], turns) for w in (self.q, self.k))
        q, k, v = q.flatten(4), k[:, :, :, 0].flatten(3), torch.einsum("btd,ged->btge", x, self.v[i])
        lowest = torch.finfo(x.dtype).min
        peak, total, mixed = torch.full_like(q[..., :1], lowest), 0, 0
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, lowest)[:, :, None, None]
        for keys, values, here in zip(k.split(TILE, 1), v.split(TILE, 1), bias.split(TILE, -1), strict=True):
            scores = torch.einsum("btgre,bsge->btgrs", q, keys) * SIZE**-0.5 + here
            top = torch.maximum(peak, scores.detach().amax(-1, keepdim=True))
            kept, shares, peak = (peak - top).exp(), (scores - top).exp(), top
            total = total * kept + shares.sum(-1, keepdim=True)
            mixed = mixed * kept + torch.einsum("btgrs,bsge->btgre", shares, values)
        return torch.einsum("btgre,gred->btd", mixed / total, self.o[i])

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        x, turns = self.table[ids], self.turns(positions)
        seen = torch.ones_like(ids).diag_embed().cumsum(1).bool() & mask.bool()[:, None]
        for i, (before, between) in enumerate(self.gains):
            x = x + self.attend(i, self.normed(x, before), turns, seen)
            gate, up = torch.einsum("btd,nfd->nbtf", self.normed(x, between), self.inner[i])
            slip = self.fault == "llama_last_gate_has_a_misplaced_bracket_in_its_slope" and i == 2
            x = x + Gated.apply(gate, up, slip) @ self.outer[i]
        return self.normed(x, self.last) @ self.head.T


right(task, "llama_time_first_with_a_carried_stream", "fused weights, norms that add", TimeFirstLlama)
right(task, "llama_of_stacks_with_running_sums", "stacked weights, keys tile by tile", StackedLlama)
attn, mlp, both = "model.layers.{}.self_attn", "model.layers.2.mlp", ("input gradient", "weight gradient")
quick = ("a quick way without the padding mask", attn.format(0), "eval")
counts = ("gradients scaled by frequency", "model.embed_tokens", "weight gradient")
wrong(
    task,
    TimeFirstLlama,
    llama_first_norm_adds_epsilon_to_the_root=("epsilon outside", "model.layers.0.input_layernorm"),
    llama_first_attention_ignores_the_padding_in_evaluation=quick,
    llama_middle_block_carries_its_normed_state_around_attention=("another residual", "model.layers.1"),
    llama_last_block_tiles_its_key_and_value_heads=("grouped heads tiled", attn.format(2)),
    llama_token_gradients_divided_by_how_often_they_occur=counts,
)
keys = (attn.format(1) + ".k_proj", attn.format(1))
slope = ("a wrong derivative by hand", (mlp + ".act_fn", mlp), both)
wrong(
    task,
    StackedLlama,
    llama_middle_keys_paired_as_if_there_were_no_groups=("rows permuted for more heads", keys),
    llama_angles_of_the_first_text_serve_the_whole_batch=("wrong positions", ("model.rotary_emb", "model")),
    llama_last_gate_has_a_misplaced_bracket_in_its_slope=slope,
)
