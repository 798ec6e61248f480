"""A tiny Falcon of the new decoder architecture: grouped keys, rotary places, two branches, a cache."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, PAD, FIRST_WORD, WORDS, ROWS, LENGTHS = -100, 2, 4, 18, 4, (6, 5)
Past = tuple[Tensor, Tensor]


@dataclass
class FalconConfig:
    vocab_size: int = FIRST_WORD + WORDS
    hidden_size: int = 24
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_kv_heads: int = 2
    ffn_hidden_size: int = 72
    layer_norm_epsilon: float = 1e-5
    rope_theta: float = 100.0
    bias: bool = True


class FalconLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        hidden_states = input @ self.weight.T
        return hidden_states if self.bias is None else hidden_states + self.bias


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Past:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class FalconRotaryEmbedding(nn.Module):
    def __init__(self, config: FalconConfig):
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Past:
        freqs = position_ids[:, :, None].to(x) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


class FalconAttention(nn.Module):
    def __init__(self, config: FalconConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_kv_heads
        self.head_dim = config.hidden_size // self.num_heads
        qkv_out_dim = (self.num_kv_heads * 2 + self.num_heads) * self.head_dim
        self.query_key_value = FalconLinear(config.hidden_size, qkv_out_dim, bias=config.bias)
        self.dense = FalconLinear(config.hidden_size, config.hidden_size, bias=config.bias)

    def _split_heads(self, fused_qkv: Tensor) -> list[Tensor]:
        """[N, T, fused] -> queries, keys, values [N, H, T, d]; a group shares its key and value."""
        batch, length, _ = fused_qkv.shape
        size = self.num_heads // self.num_kv_heads + 2
        qkv = fused_qkv.view(batch, length, -1, size, self.head_dim)
        query, key, value = qkv[:, :, :, :-2], qkv[:, :, :, [-2]], qkv[:, :, :, [-1]]
        key, value = torch.broadcast_to(key, query.shape), torch.broadcast_to(value, query.shape)
        return [x.flatten(2, 3).transpose(1, 2) for x in (query, key, value)]

    def forward(
        self, hidden_states: Tensor, mask: Tensor, position_embeddings: Past, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = torch.cat([layer_past[0], key], 2), torch.cat([layer_past[1], value], 2)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)
        scores = F.softmax(scores.masked_fill(mask, torch.finfo(scores.dtype).min), dim=-1)
        return self.dense((scores @ value).transpose(1, 2).flatten(2)), (key, value)


class FalconMLP(nn.Module):
    def __init__(self, config: FalconConfig):
        super().__init__()
        self.dense_h_to_4h = FalconLinear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.act = nn.GELU()
        self.dense_4h_to_h = FalconLinear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class FalconDecoderLayer(nn.Module):
    def __init__(self, config: FalconConfig):
        super().__init__()
        self.self_attention = FalconAttention(config)
        self.mlp = FalconMLP(config)
        self.ln_attn = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln_mlp = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(
        self, hidden_states: Tensor, mask: Tensor, position_embeddings: Past, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        attention_layernorm_out = self.ln_attn(hidden_states)
        mlp_layernorm_out = self.ln_mlp(hidden_states)
        attention_output, present = self.self_attention(
            attention_layernorm_out, mask, position_embeddings, layer_past
        )
        return hidden_states + (self.mlp(mlp_layernorm_out) + attention_output), present


class FalconModel(nn.Module):
    """Words [N, T] behind those of the cache, and a mask of both [N, K] -> all states, the new cache."""

    def __init__(self, config: FalconConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(FalconDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.rotary_emb = FalconRotaryEmbedding(config)

    @staticmethod
    def _causal_mask(attention_mask: Tensor, length: int) -> Tensor:
        """True for what a word must not see, [N, 1, T, K]: later words and padding."""
        places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return (places > places[-length:, None]) | (attention_mask < 1)[:, None, None]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: list[Past] | None = None,
    ) -> tuple[list[Tensor], list[Past]]:
        hidden_states = self.word_embeddings(input_ids)
        mask = self._causal_mask(attention_mask, input_ids.shape[1])
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        all_hidden_states, presents = [], []
        for i, block in enumerate(self.h):
            all_hidden_states.append(hidden_states)
            layer_past = past[i] if past else None
            hidden_states, present = block(hidden_states, mask, position_embeddings, layer_past)
            presents.append(present)
        return [*all_hidden_states, self.ln_f(hidden_states)], presents


class FalconForCausalLM(nn.Module):
    """Two parts of a text, the second read behind the cache of the first -> logits and states of both."""

    def __init__(self):
        super().__init__()
        config = FalconConfig()
        self.transformer = FalconModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0 * module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.25)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.2)
        self.lm_head.weight = self.transformer.word_embeddings.weight

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        length = first.shape[1]
        begun, past = self.transformer(first, attention_mask[:, :length], position_ids[:, :length])
        continued, _ = self.transformer(second, attention_mask, position_ids[:, length:], past)
        states = torch.cat([torch.stack(begun), torch.stack(continued)], 2)
        return {"logits": self.lm_head(states[-1]), "hidden_states": states}


def refrains() -> tuple[dict[str, Tensor], Tensor]:
    """Each text says two to four words again and again, behind padding on the left; what comes next is
    asked where it can be known."""
    total = sum(LENGTHS)
    ids, labels = torch.full((ROWS, total), PAD), torch.full((ROWS, total), IGNORED)
    for row, pads in enumerate(torch.randperm(ROWS).tolist()):
        period = int(torch.randint(2, 5, ()))
        words = FIRST_WORD + torch.randperm(WORDS)[:period]
        text = words[torch.arange(total + 1 - pads) % period]
        ids[row, pads:], labels[row, pads + period - 1 :] = text[:-1], text[period:]
    first, second = ids.split(LENGTHS, 1)
    return {"first": first, "second": second, "attention_mask": (ids != PAD).long()}, labels


def surprise(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].mT, labels, ignore_index=IGNORED)
