"""A small GPT-NeoX: attention and MLP side by side, heads turned in part, a prompt read before its rest."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROMPT, FOLLOWING, IGNORED = 5, 7, -100

Past = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GPTNeoXConfig:
    vocab_size: int = 29
    hidden_size: int = 24
    intermediate_size: int = 96
    num_hidden_layers: int = 3
    num_attention_heads: int = 3
    rotary_pct: float = 0.5
    rotary_emb_base: float = 10000.0
    layer_norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_ndims(self) -> int:
        return int(self.head_size * self.rotary_pct)


class GPTNeoXRotaryEmbedding(nn.Module):
    """Positions [N, T] -> cosines and sines [N, T, turned part of a head], the same in both halves."""

    def __init__(self, config: GPTNeoXConfig):
        super().__init__()
        powers = torch.arange(0, config.rotary_ndims, 2) / config.rotary_ndims
        self.register_buffer("inv_freq", config.rotary_emb_base**-powers, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None] * self.inv_freq
        emb = torch.cat([freqs, freqs], -1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the front of each head [N, heads, T, size]; the rest of it passes."""
    turned, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([turned * cos + rotate_half(turned) * sin, passed], -1)


class GPTNeoXAttention(nn.Module):
    def __init__(self, config: GPTNeoXConfig):
        super().__init__()
        self.head_size = config.head_size
        self.scaling = self.head_size**-0.5
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, attention_mask: Tensor, position_embeddings: Past, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        fused = self.query_key_value(x).unflatten(-1, (-1, 3 * self.head_size)).transpose(1, 2)
        query, key, value = fused.chunk(3, -1)
        query = apply_rotary_pos_emb(query, *position_embeddings)
        key = apply_rotary_pos_emb(key, *position_embeddings)
        if layer_past is not None:
            key = torch.cat([layer_past[0], key], 2)
            value = torch.cat([layer_past[1], value], 2)
        weights = query @ key.transpose(2, 3) * self.scaling + attention_mask
        context = weights.softmax(-1) @ value
        return self.dense(context.transpose(1, 2).flatten(2)), (key, value)


class GPTNeoXMLP(nn.Module):
    def __init__(self, config: GPTNeoXConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class GPTNeoXLayer(nn.Module):
    """Attention and MLP read the same states, each through a norm of its own."""

    def __init__(self, config: GPTNeoXConfig):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = GPTNeoXAttention(config)
        self.mlp = GPTNeoXMLP(config)

    def forward(
        self, x: Tensor, attention_mask: Tensor, position_embeddings: Past, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        y, present = self.attention(self.input_layernorm(x), attention_mask, position_embeddings, layer_past)
        return self.mlp(self.post_attention_layernorm(x)) + y + x, present


class GPTNeoXModel(nn.Module):
    """States after the last norm, those of all layers, keys and values; the mask covers the past as well."""

    def __init__(self, config: GPTNeoXConfig):
        super().__init__()
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GPTNeoXLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = GPTNeoXRotaryEmbedding(config)

    @staticmethod
    def causal_mask(attention_mask: Tensor, asked: int, dtype: torch.dtype) -> Tensor:
        """Zero where a query may look, the lowest number elsewhere: [N, 1, queries, keys]."""
        known = attention_mask.shape[1]
        seen = torch.ones(asked, known, dtype=torch.bool, device=attention_mask.device).tril(known - asked)
        hidden = ~(seen & attention_mask.bool()[:, None, None])
        return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: tuple[Past, ...] | None = None
    ) -> tuple[Tensor, Tensor, tuple[Past, ...]]:
        asked = input_ids.shape[1]
        x = self.embed_in(input_ids)
        position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        position_embeddings = self.rotary_emb(position_ids[:, -asked:])
        mask = self.causal_mask(attention_mask, asked, x.dtype)
        hidden_states, presents = [], []
        for layer, past in zip(self.layers, past_key_values or [None] * len(self.layers), strict=True):
            hidden_states.append(x)
            x, present = layer(x, mask, position_embeddings, past)
            presents.append(present)
        x = self.final_layer_norm(x)
        return x, torch.stack([*hidden_states, x]), tuple(presents)


class GPTNeoXForCausalLM(nn.Module):
    """Ids of a prompt and its rest, a mask of both -> scores of both, the states of the second call."""

    def __init__(self, config: GPTNeoXConfig | None = None):
        super().__init__()
        config = config or GPTNeoXConfig()
        self.gpt_neox = GPTNeoXModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self.varied)

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer, gain and bias count."""
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
            nn.init.normal_(module.bias, std=0.2)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.2)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)

    def forward(self, prompt_ids: Tensor, following_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        prompt, _, cache = self.gpt_neox(prompt_ids, attention_mask[:, : prompt_ids.shape[1]])
        following, hidden_states, _ = self.gpt_neox(following_ids, attention_mask, cache)
        return {
            "prompt_logits": self.embed_out(prompt),
            "logits": self.embed_out(following),
            "hidden_states": hidden_states,
        }


def continued_texts() -> tuple[dict[str, Tensor], Tensor]:
    """Four texts that go on by a rule with some noise; three of them are padded on the left."""
    length = PROMPT + FOLLOWING
    tokens = [torch.randint(28, (4,))]
    for _ in range(length - 1):
        tokens.append((5 * tokens[-1] + 2 + torch.randint(2, (4,))) % 28)
    mask = (torch.arange(length) >= torch.randperm(4)[:, None]).long()
    ids = (torch.stack(tokens, 1) + 1) * mask
    prompt_ids, following_ids = ids.split([PROMPT, FOLLOWING], 1)
    labels = ids.masked_fill(mask.cumsum(1) < 2, IGNORED)
    inputs = {"prompt_ids": prompt_ids, "following_ids": following_ids, "attention_mask": mask}
    return inputs, labels


def next_token_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Cross entropy of each label and the scores one place before it, over both parts."""
    logits = torch.cat([outputs["prompt_logits"], outputs["logits"]], 1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
