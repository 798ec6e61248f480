"""A small Command R: layers of attention beside a gated MLP, for sequences that are padded on the left."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQUENCES, LENGTH, IGNORED = 4, 13, -100


@dataclass(frozen=True)
class CohereConfig:
    vocab_size: int = 67
    hidden_size: int = 44
    intermediate_size: int = 76
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 8
    layer_norm_eps: float = 1e-5
    rope_theta: float = 400.0
    logit_scale: float = 0.8
    pad_token_id: int = 0
    bos_token_id: int = 5


def linear(in_features: int, out_features: int, gain: float = 1.0) -> nn.Linear:
    """A layer without bias, whose weight is drawn."""
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(in_features))
    return layer


def rotate_half(x: Tensor) -> Tensor:
    """Turns each pair of neighbours by a right angle."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[N, K, T, D] -> [N, K n_rep, T, D], each head beside its copies."""
    n, heads, length, size = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(n, heads, n_rep, length, size)
    return hidden_states.reshape(n, heads * n_rep, length, size)


class CohereLayerNorm(nn.Module):
    """In float at least; without bias."""

    def __init__(self, hidden_size: int | tuple[int, ...], eps: float):
        super().__init__()
        size = (hidden_size,) if isinstance(hidden_size, int) else hidden_size
        self.weight = nn.Parameter(1.1 + 0.3 * torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        dtype = torch.promote_types(input_dtype, torch.float32)
        hidden_states = hidden_states.to(dtype)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(dtype) * hidden_states).to(input_dtype)


class CohereRotaryEmbedding(nn.Module):
    def __init__(self, config: CohereConfig):
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponent, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(self.inv_freq) * self.inv_freq
        emb = torch.repeat_interleave(freqs, 2, dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class CohereMLP(nn.Module):
    def __init__(self, config: CohereConfig):
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class CohereAttention(nn.Module):
    def __init__(self, config: CohereConfig):
        super().__init__()
        heads, groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_key_value_groups, self.scaling = heads // groups, config.head_dim**-0.5
        self.q_proj = linear(config.hidden_size, heads * self.head_dim)
        self.k_proj = linear(config.hidden_size, groups * self.head_dim)
        self.v_proj = linear(config.hidden_size, groups * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, config.hidden_size)
        self.q_norm = CohereLayerNorm((heads, self.head_dim), config.layer_norm_eps)
        self.k_norm = CohereLayerNorm((groups, self.head_dim), config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query_states = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = F.softmax(attn_weights + attention_mask, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2)
        return self.o_proj(attn_output.reshape(*hidden_states.shape[:-1], -1))


class CohereDecoderLayer(nn.Module):
    """Attention and the MLP read one norm, side by side."""

    def __init__(self, config: CohereConfig):
        super().__init__()
        self.self_attn, self.mlp = CohereAttention(config), CohereMLP(config)
        self.input_layernorm = CohereLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states_attention = self.self_attn(hidden_states, cos, sin, attention_mask)
        hidden_states_mlp = self.mlp(hidden_states)
        return residual + hidden_states_attention + hidden_states_mlp


class CohereModel(nn.Module):
    def __init__(self, config: CohereConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(CohereDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = CohereLayerNorm(config.hidden_size, config.layer_norm_eps)
        self.rotary_emb = CohereRotaryEmbedding(config)

    def _update_causal_mask(self, attention_mask: Tensor, x: Tensor) -> Tensor:
        """What is added to the scores: the least number where a key comes later or is padding."""
        least = torch.finfo(x.dtype).min
        causal_mask = x.new_full((x.shape[1], x.shape[1]), least).triu(1)
        return causal_mask[None, None].masked_fill(attention_mask[:, None, None] == 0, least)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        causal_mask = self._update_causal_mask(attention_mask, hidden_states)
        cos, sin = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, cos, sin, causal_mask)
        return self.norm(hidden_states)


class CohereForCausalLM(nn.Module):
    """Tokens [N, T] and their mask -> logits [N, T, V]; the head shares the embedding's weight."""

    def __init__(self, config: CohereConfig | None = None):
        super().__init__()
        self.config = config or CohereConfig()
        self.model, self.logit_scale = CohereModel(self.config), self.config.logit_scale
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.model(input_ids, attention_mask)
        return self.lm_head(hidden_states) * self.logit_scale


def counts() -> tuple[dict[str, Tensor], Tensor]:
    """Counts from somewhere by a stride of their own, with a slip now and then, padded on the left."""
    config = CohereConfig()
    first = config.bos_token_id + 1
    start, stride = torch.randint(40, (SEQUENCES, 1)), torch.randint(1, 8, (SEQUENCES, 1))
    place = torch.arange(LENGTH) - torch.tensor([0, 2, 3, 5])[torch.randperm(SEQUENCES), None]
    slip = torch.randint(-2, 3, place.shape) * (torch.rand(place.shape) < 0.15)
    tokens = first + (start + stride * place + slip) % (config.vocab_size - first)
    tokens = tokens.masked_fill(place == 0, config.bos_token_id)
    tokens, mask = tokens.masked_fill(place < 0, config.pad_token_id), (place >= 0).long()
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(mask == 0, IGNORED)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each token that comes next; that of padding does not count."""
    labels = labels[:, 1:].masked_fill(labels[:, :-1] == IGNORED, IGNORED)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
