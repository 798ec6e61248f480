"""A decoder in the manner of Llama as Hugging Face writes it, small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from bench.ported._text import VOCABULARY, merge, split, text_task

WIDTH, HEADS, GROUPS, HEAD, HIDDEN = 32, 4, 2, 8, 48


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class RotaryEmbedding(nn.Module):
    """Positions -> cosines and sines of both halves, [T, d]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 1 / 10000 ** (torch.arange(0, HEAD, 2, device=x.device).to(x.dtype) / HEAD)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).to(x.dtype), inverse)
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = split(self.q_proj(x), HEADS), split(self.k_proj(x), GROUPS)
        v = split(self.v_proj(x), GROUPS).repeat_interleave(HEADS // GROUPS, 1)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        scores = q @ k.repeat_interleave(HEADS // GROUPS, 1).transpose(2, 3) / HEAD**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.o_proj(merge(scores.masked_fill(future, float("-inf")).softmax(-1) @ v))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(WIDTH), MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm, self.rotary_emb = RMSNorm(WIDTH), RotaryEmbedding()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class ForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


llama = text_task("llama_small", ForCausalLM)
LAYERS = ("model.layers.0", "model.layers.1")


def every(part: str) -> tuple[str, ...]:
    """The names of a part in both layers."""
    return tuple(f"{layer}.{part}" for layer in LAYERS)
