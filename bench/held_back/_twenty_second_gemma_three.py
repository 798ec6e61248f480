"""A small Gemma 3 for causal language modelling: layers that see a window and layers that see all."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, WORDS, PAD, BOS, FIRST_WORD, LENGTH = -100, 30, 0, 2, 3, 12
bare = partial(nn.Linear, bias=False)


@dataclass(frozen=True)
class Gemma3TextConfig:
    vocab_size: int = FIRST_WORD + WORDS
    hidden_size: int = 20
    intermediate_size: int = 32
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    rms_norm_eps: float = 1e-6
    rope_theta: float = 400.0
    rope_local_base_freq: float = 30.0
    rope_scaling_factor: float = 4.0
    query_pre_attn_scalar: int = 12
    sliding_window: int = 4
    sliding_window_pattern: int = 2
    final_logit_softcapping: float = 4.0
    pad_token_id: int = PAD


class Gemma3TextScaledWordEmbedding(nn.Embedding):
    def __init__(self, *sizes: int, embed_scale: float):
        super().__init__(*sizes)
        self.register_buffer("embed_scale", torch.tensor(embed_scale), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


class Gemma3MLP(nn.Module):
    def __init__(self, config: Gemma3TextConfig):
        super().__init__()
        ends = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = bare(*ends), bare(*ends), bare(*ends[::-1])
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gemma3RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class Gemma3RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions, which a linear scaling divides by its factor."""

    def __init__(self, config: Gemma3TextConfig):
        super().__init__()
        steps = torch.arange(0, config.head_dim, 2) / config.head_dim
        inv_freq = 1.0 / config.rope_theta**steps
        self.register_buffer("inv_freq", inv_freq / config.rope_scaling_factor, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        emb = (position_ids[:, :, None].to(x.dtype) * self.inv_freq.to(x.dtype)).repeat(1, 1, 2)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """[N, key heads, T, d] -> [N, heads, T, d]; neighbours share a key head."""
    return x[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


def create_causal_mask(attention_mask: Tensor, like: Tensor, sliding_window: int | None = None) -> Tensor:
    """Zero where a key is seen and the lowest number elsewhere, [N, 1, T, T]."""
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    allowed = index[None, :] <= index[:, None]
    if sliding_window is not None:
        allowed = allowed & (index[None, :] > index[:, None] - sliding_window)
    allowed = allowed & attention_mask[:, None, None, :].bool()
    return (~allowed).to(like.dtype) * torch.finfo(like.dtype).min


class Gemma3Attention(nn.Module):
    def __init__(self, config: Gemma3TextConfig, layer_idx: int):
        super().__init__()
        self.is_sliding = bool((layer_idx + 1) % config.sliding_window_pattern)
        self.head_dim, self.scaling = config.head_dim, config.query_pre_attn_scalar**-0.5
        heads, hidden = (config.num_attention_heads, config.num_key_value_heads), config.hidden_size
        width, kv_width = heads[0] * config.head_dim, heads[1] * config.head_dim
        self.num_key_value_groups = heads[0] // heads[1]
        self.q_proj, self.k_proj = bare(hidden, width), bare(hidden, kv_width)
        self.v_proj, self.o_proj = bare(hidden, kv_width), bare(width, hidden)
        self.q_norm, self.k_norm = (Gemma3RMSNorm(config.head_dim, config.rms_norm_eps) for _ in "qk")

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        states = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (y.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for y in states)
        query, key = apply_rotary_pos_emb(self.q_norm(query), self.k_norm(key), *position_embeddings)
        key, value = (repeat_kv(y, self.num_key_value_groups) for y in (key, value))
        weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling + mask
        return self.o_proj(torch.matmul(F.softmax(weights, dim=-1), value).transpose(1, 2).flatten(2))


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: Gemma3TextConfig, layer_idx: int):
        super().__init__()
        self.self_attn, self.mlp = Gemma3Attention(config, layer_idx), Gemma3MLP(config)
        self.attention_type = "sliding_attention" if self.self_attn.is_sliding else "full_attention"
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self.add_module(name + "_layernorm", Gemma3RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor, embeddings_global: tuple, embeddings_local: tuple, mask: Tensor) -> Tensor:
        position_embeddings = embeddings_local if self.self_attn.is_sliding else embeddings_global
        y = self.self_attn(self.input_layernorm(x), position_embeddings, mask)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3TextModel(nn.Module):
    def __init__(self, config: Gemma3TextConfig):
        super().__init__()
        self.config, hidden = config, config.hidden_size
        sizes = config.vocab_size, hidden, config.pad_token_id
        self.embed_tokens = Gemma3TextScaledWordEmbedding(*sizes, embed_scale=hidden**0.5)
        self.layers = nn.ModuleList(Gemma3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Gemma3RMSNorm(hidden, config.rms_norm_eps)
        self.rotary_emb = Gemma3RotaryEmbedding(config)
        config = replace(config, rope_theta=config.rope_local_base_freq, rope_scaling_factor=1.0)
        self.rotary_emb_local = Gemma3RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        position_ids = torch.arange(x.shape[1], device=x.device)[None]
        masks = {"full_attention": create_causal_mask(attention_mask, x)}
        masks["sliding_attention"] = create_causal_mask(attention_mask, x, self.config.sliding_window)
        embeddings = self.rotary_emb(x, position_ids), self.rotary_emb_local(x, position_ids)
        for layer in self.layers:
            x = layer(x, *embeddings, masks[layer.attention_type])
        return self.norm(x)


class Gemma3ForCausalLM(nn.Module):
    """Tokens and their mask, [N, T] -> logits [N, T, V] and the last states; the head shares the table."""

    def __init__(self):
        super().__init__()
        self.config = config = Gemma3TextConfig()
        self.model = Gemma3TextModel(config)
        self.lm_head = bare(config.hidden_size, config.vocab_size)
        for weight in self.model.layers.parameters():
            nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5 if weight.ndim > 1 else 0.3)
        nn.init.uniform_(self.model.norm.weight, -0.4, 0.6)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.3)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        states = self.model(input_ids, attention_mask)
        logits, cap = self.lm_head(states), self.config.final_logit_softcapping
        return {"logits": torch.tanh(logits / cap) * cap, "last_hidden_state": states}


def counted() -> tuple[dict[str, Tensor], Tensor]:
    """Rows padded on the left that count up by steps of their own; every fourth word is the first again."""
    index = torch.arange(LENGTH)
    begin = torch.tensor([0, 1, 3, 4])[torch.randperm(4), None]
    first, step = torch.randint(WORDS, begin.shape), torch.randint(1, 5, begin.shape)
    count = index - begin - 1
    words = (first + step * count.where(count % 4 != 3, 0)) % WORDS + FIRST_WORD
    tokens = words.masked_fill(count == -1, BOS).masked_fill(count < -1, PAD)
    labels = tokens.masked_fill(count < 1, IGNORED)
    return {"input_ids": tokens, "attention_mask": (index >= begin).long()}, labels


def next_word(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"][:, :-1].mT, labels[:, 1:], ignore_index=IGNORED)
