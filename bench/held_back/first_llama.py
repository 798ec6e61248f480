"""A Llama: rotary positions in pairs or halves, grouped keys, decoding with a cache in eval mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import both, joined, later, leaf
from bench.tasks import _task, _tokens_loss

W, Q, KV, H = 24, 4, 2, 6


def norm() -> nn.RMSNorm:
    return nn.RMSNorm(W, eps=1e-5)


def angles(places: Tensor, like: Tensor) -> Tensor:
    """[T, H / 2]."""
    rates = 100.0 ** (-torch.arange(0, H, 2, dtype=like.dtype, device=like.device) / H)
    return places.to(like.dtype)[:, None] * rates


def turn(x: Tensor, by: Tensor) -> Tensor:
    """[N, T, heads, H], neighbours as a pair."""
    a, b, cos, sin = x[..., ::2], x[..., 1::2], by.cos()[:, None], by.sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(W, Q * H, bias=False), nn.Linear(Q * H, W, bias=False)
        self.wk, self.wv = nn.Linear(W, KV * H, bias=False), nn.Linear(W, KV * H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        by = angles(torch.arange(x.shape[1], device=x.device), x)
        q, k = turn(self.wq(x).unflatten(2, (Q, H)), by), turn(self.wk(x).unflatten(2, (KV, H)), by)
        k, v = (
            t.repeat_interleave(Q // KV, 2).transpose(1, 2) for t in (k, self.wv(x).unflatten(2, (KV, H)))
        )
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*s, bias=False) for s in ((W, 32), (32, W), (W, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention, self.ffn_norm, self.feed_forward = (
            norm(),
            Attention(),
            norm(),
            Feed(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.layers = nn.Embedding(27, W), nn.Sequential(Block(), Block())
        self.norm, self.output = norm(), nn.Linear(W, 27, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.layers(self.tok(tokens))))


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(27, (5, 10))
    return tokens[:, :-1], tokens[:, 1:]


llama = _task("first_llama", Llama, _batch, _tokens_loss)


def in_halves(weight: Tensor) -> Tensor:
    """Rows of a projection so that the pairs of a head stand H / 2 apart."""
    return weight.unflatten(0, (-1, H // 2, 2)).transpose(1, 2).flatten(0, 2)


class HalvesBlock(nn.Module):
    def __init__(self, block: Block, wrong: bool):
        super().__init__()
        a, f = block.attention, block.feed_forward
        self.input_layernorm, self.post_layernorm = block.attention_norm, block.ffn_norm
        self.q_proj, self.o_proj, self.v_proj, self.down_proj = a.wq, a.wo, a.wv, f.w2
        self.q_proj.weight = leaf(in_halves(a.wq.weight))
        self.k_weight = leaf(a.wk.weight if wrong else in_halves(a.wk.weight))
        self.gate_up = joined([f.w1.weight, f.w3.weight])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(t: Tensor) -> Tensor:
            t = t.unflatten(2, (-1, H)).transpose(1, 2)
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        y = self.input_layernorm(x)
        q, k = rotated(self.q_proj(y)).unflatten(1, (KV, -1)), rotated(F.linear(y, self.k_weight))
        scores = torch.einsum("ngrtk,ngsk->ngrts", q, k) * H**-0.5
        weights = scores.masked_fill(later(x.shape[1], x.device), -torch.inf).softmax(-1)
        mixed = torch.einsum("ngrts,nsgk->ntgrk", weights, self.v_proj(y).unflatten(2, (KV, H)))
        x = x + self.o_proj(mixed.flatten(2))
        gate, up = F.linear(self.post_layernorm(x), self.gate_up).chunk(2, 2)
        return x + self.down_proj(F.silu(gate) * up)


class Halves(nn.Module):
    """Rotation by halves, permuted weights, angles made once for all layers."""

    def __init__(self, model: Llama, wrong: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(HalvesBlock(b, wrong) for b in model.layers)
        self.embed_tokens, self.norm, self.lm_head = model.tok, model.norm, model.output

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        by = angles(torch.arange(ids.shape[1], device=x.device), x).repeat(1, 2)
        for block in self.blocks:
            x = block(x, by.cos(), by.sin())
        return self.lm_head(self.norm(x))


class Cached(nn.Module):
    """All at once in training, token by token with a cache in eval mode."""

    def __init__(self, model: Llama, wrong: bool = False):
        super().__init__()
        self.wrong, self.table, self.head = wrong, leaf(model.tok.weight), leaf(model.output.weight)
        norms = [n for b in model.layers for n in (b.attention_norm, b.ffn_norm)]
        self.scales = nn.ParameterList([leaf(n.weight) for n in [*norms, model.norm]])
        self.mix, self.out = (
            nn.ParameterList(),
            nn.ParameterList(leaf(b.attention.wo.weight.T) for b in model.layers),
        )
        self.feeds = nn.ParameterList()
        for a, f in ((b.attention, b.feed_forward) for b in model.layers):
            self.mix.append(joined([a.wk.weight, a.wv.weight, a.wq.weight]))
            self.feeds.extend([leaf(f.w1.weight.T), leaf(f.w3.weight.T), leaf(f.w2.weight.T)])

    def run(self, tokens: Tensor, past: dict[int, Tensor]) -> Tensor:
        x, scales, feeds = self.table[tokens], list(self.scales), list(self.feeds)
        for i in range(2):
            start, t = (past[i].shape[3] if i in past else 0), tokens.shape[1]
            place = torch.arange(start, start + t, device=x.device)
            kvq = F.linear(F.rms_norm(x, (W,), scales[2 * i], 1e-5), self.mix[i]).unflatten(2, (-1, H))
            k, v, q = kvq.split([KV, KV, Q], 2)
            q, k = turn(q, angles(place + int(self.wrong and start > 0), x)), turn(k, angles(place, x))
            new = torch.stack([k, v]).transpose(2, 3)
            past[i] = torch.cat([past[i], new], 3) if start else new
            kept = torch.arange(start + t, device=x.device) <= place[:, None]
            q, (k, v) = q.transpose(1, 2), past[i]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True)
            x = x + mixed.transpose(1, 2).flatten(2) @ self.out[i]
            y = F.rms_norm(x, (W,), scales[2 * i + 1], 1e-5)
            x = x + (F.silu(y @ feeds[3 * i]) * (y @ feeds[3 * i + 1])) @ feeds[3 * i + 2]
        return F.rms_norm(x, (W,), scales[4], 1e-5) @ self.head.T

    def forward(self, tokens: Tensor) -> Tensor:
        past: dict[int, Tensor] = {}
        return torch.cat([self.run(part, past) for part in tokens.split(999 if self.training else 1, 1)], 1)


class OtherNorm(nn.RMSNorm):
    """By the vector's length; the epsilon under the root or after it."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong:
            return self.weight * x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * W**-0.5 + 1e-5)
        return self.weight * x * W**0.5 / (torch.linalg.vecdot(x, x)[..., None] + W * 1e-5).sqrt()


both(llama, Halves, "rotary_by_halves", "keys_not_permuted", "layers.0.attention")
both(llama, Cached, "cache_in_eval_mode", "cache_counts_the_new_token", "layers.0.attention", passes="eval")
both(llama, OtherNorm, "norm_by_length", "epsilon_after_the_root", "norm")
