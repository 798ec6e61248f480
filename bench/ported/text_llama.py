"""Llama as Hugging Face has it against Meta's (complex numbers, cache) and Megatron's (fused projections)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._text import dense, kept, stacked
from bench.ported._text_llama import GROUPS, HEAD, HEADS, LAYERS, every, llama


class Gain(nn.Module):
    """RMSNorm under other names."""

    def __init__(self, norm: nn.Module, eps: float):
        super().__init__()
        self.scale, self.eps = kept(norm.weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.scale


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows for a rotation of halves, put in the order of one that turns neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def turned(x: Tensor, start: int = 0) -> Tensor:
    """[N, T, heads, d] rotated in complex numbers, from position ``start`` on."""
    rates = 10000 ** (-torch.arange(0, HEAD, 2, device=x.device).to(x.dtype) / HEAD)
    at = torch.arange(start, start + x.shape[1], device=x.device).to(x.dtype)
    angle = torch.outer(at, rates)[:, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class MetaBlock(nn.Module):
    def __init__(self, layer: nn.Module, late: bool):
        super().__init__()
        own, mlp = layer.self_attn, layer.mlp
        self.wq, self.wk = (
            dense(neighbours(p.weight, p.weight.shape[0] // HEAD)) for p in (own.q_proj, own.k_proj)
        )
        self.wv, self.wo = dense(own.v_proj.weight), dense(own.o_proj.weight)
        self.w1, self.w2, self.w3 = (dense(p.weight) for p in (mlp.gate_proj, mlp.down_proj, mlp.up_proj))
        self.attention_norm, self.ffn_norm = (
            Gain(layer.input_layernorm, 1e-6),
            Gain(layer.post_attention_layernorm, 1e-6),
        )
        self.late = late

    def forward(self, x: Tensor, start: int, cache: list) -> Tensor:
        h, at = self.attention_norm(x), max(0, start - self.late)
        q, k = (
            turned(self.wq(h).unflatten(2, (HEADS, HEAD)), at),
            turned(self.wk(h).unflatten(2, (GROUPS, HEAD)), at),
        )
        cache.append((k, self.wv(h).unflatten(2, (GROUPS, HEAD))))
        keys, values = (
            torch.cat(parts, 1).repeat_interleave(HEADS // GROUPS, 2) for parts in zip(*cache, strict=True)
        )
        scores = torch.einsum("nqhd,nkhd->nhqk", q, keys) * HEAD**-0.5
        seen = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool, device=x.device).tril(start)
        weights = scores.masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.wo(torch.einsum("nhqk,nkhd->nqhd", weights, values).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class MetaLlama(nn.Module):
    """In eval mode the last tokens are fed one by one, with a cache of keys and values."""

    def __init__(self, model: nn.Module, eps: float = 1e-6, late: bool = False):
        super().__init__()
        self.tok_embeddings = nn.Embedding.from_pretrained(
            kept(model.model.embed_tokens.weight), freeze=False
        )
        self.blocks = nn.ModuleList(MetaBlock(layer, late) for layer in model.model.layers)
        self.ln_f, self.output = Gain(model.model.norm, eps), dense(model.lm_head.weight)

    def run(self, ids: Tensor, start: int, caches: list[list]) -> Tensor:
        x = self.tok_embeddings(ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, start, cache)
        return self.output(self.ln_f(x))

    def forward(self, input_ids: Tensor) -> Tensor:
        caches: list[list] = [[] for _ in self.blocks]
        if self.training:
            return self.run(input_ids, 0, caches)
        prompt, length = input_ids.shape[1] // 2, input_ids.shape[1]
        parts = [self.run(input_ids[:, :prompt], 0, caches)]
        parts += [self.run(input_ids[:, t : t + 1], t, caches) for t in range(prompt, length)]
        return torch.cat(parts, 1)


@case(SAME, "complex rotary, cache in eval", llama)
def llama_as_meta_writes_it(model: nn.Module) -> nn.Module:
    return MetaLlama(model)


@case("bug", "another eps", llama, module=("model.norm",))
def llama_last_norm_with_another_eps(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The last norm adds 1e-5, as Llama 2 does, where this one adds 1e-6."""
    return MetaLlama(model, eps=1e-5 if wrong else 1e-6)


@case(
    "bug",
    "cache",
    llama,
    module=("", "model", *LAYERS, *every("self_attn"), "model.rotary_emb"),
    passes="eval",
)
def llama_cached_tokens_turned_one_late(model: nn.Module, wrong: bool = True) -> nn.Module:
    """Tokens decoded after the prompt get the rotary position before their own."""
    return MetaLlama(model, late=wrong)


class MegatronLayer(nn.Module):
    def __init__(self, layer: nn.Module, swapped: bool):
        super().__init__()
        own, mlp, share = layer.self_attn, layer.mlp, HEADS // GROUPS
        q, k, v = (p.weight.unflatten(0, (GROUPS, -1)) for p in (own.q_proj, own.k_proj, own.v_proj))
        rows = torch.cat([q, k, v], 1).flatten(0, 1)
        self.sizes = [share * HEAD, HEAD, HEAD]
        self.linear_qkv, self.linear_proj = dense(rows), dense(own.o_proj.weight)
        halves = (mlp.up_proj, mlp.gate_proj) if swapped else (mlp.gate_proj, mlp.up_proj)
        self.linear_fc1, self.linear_fc2 = stacked(*halves), dense(mlp.down_proj.weight)
        self.norms = nn.ModuleList(
            [Gain(layer.input_layernorm, 1e-6), Gain(layer.post_attention_layernorm, 1e-6)]
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[T, N, D] -> [T, N, D], as Megatron lays it out."""
        mixed = self.linear_qkv(self.norms[0](x)).unflatten(-1, (GROUPS, -1))
        q, k, v = mixed.split(self.sizes, -1)
        q = self.turn(q.reshape(*q.shape[:2], HEADS, HEAD), angles)
        k, v = self.turn(k, angles), v
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.linear_proj(y.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.linear_fc1(self.norms[1](x)).chunk(2, -1)
        return x + self.linear_fc2(F.silu(gate) * up)

    @staticmethod
    def turn(x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        low, high = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class MegatronLlama(nn.Module):
    def __init__(self, model: nn.Module, swapped: bool = False, base: float = 1e4):
        super().__init__()
        self.word_embeddings, self.base = kept(model.model.embed_tokens.weight), base
        self.decoder = nn.ModuleList(MegatronLayer(layer, swapped) for layer in model.model.layers)
        self.final, self.output_layer = Gain(model.model.norm, 1e-6), dense(model.lm_head.weight)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = F.embedding(input_ids.T, self.word_embeddings)
        steps = torch.arange(0, HEAD, 2, device=x.device).to(x.dtype) / HEAD
        angles = torch.arange(len(x), device=x.device).to(x.dtype)[:, None] * self.base**-steps
        for layer in self.decoder:
            x = layer(x, angles)
        return {"scores": self.output_layer(self.final(x)).transpose(0, 1)}


@case(SAME, "fused and grouped projections", llama)
def llama_as_megatron_writes_it(model: nn.Module) -> nn.Module:
    return MegatronLlama(model)


GATED = (*LAYERS, *every("mlp"), *every("mlp.gate_proj"), *every("mlp.up_proj"))


@case("bug", "fused weights in another order", llama, module=GATED)
def llama_gate_and_up_exchanged(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The fused layer of the MLP holds up before gate, and SiLU is taken of its first half."""
    return MegatronLlama(model, swapped=wrong)


@case("bug", "rotary base", llama, module=("model.rotary_emb", *every("self_attn")))
def llama_rotary_base_of_the_next_version(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The rotary base is 500000, as from Llama 3 on, where this one was trained with 10000."""
    return MegatronLlama(model, base=5e5 if wrong else 1e4)
