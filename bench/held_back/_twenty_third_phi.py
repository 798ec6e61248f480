"""A tiny Phi: attention and MLP side by side, partly turned heads, a prompt, then more by a cache."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, END_OF_TEXT, ROWS, PROMPT, MORE = -100, 0, 4, 7, 5


@dataclass
class PhiConfig:
    vocab_size: int = 24
    hidden_size: int = 32
    intermediate_size: int = 40
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    head_dim: int = 8
    num_key_value_heads: int = 2
    partial_rotary_factor: float = 0.5
    rope_theta: float = 100.0
    layer_norm_eps: float = 1e-5


class DynamicCache:
    """Keys and values [N, H, T, D] of each layer, with those of earlier calls before them."""

    def __init__(self):
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self.layers):
            self.layers.append((key_states, value_states))
        else:
            pairs = zip(self.layers[layer_idx], (key_states, value_states), strict=True)
            self.layers[layer_idx] = tuple(torch.cat(pair, dim=-2) for pair in pairs)
        return self.layers[layer_idx]


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[N, heads, T, D] -> [N, heads n_rep, T, D], copies of a head next to each other."""
    return hidden_states[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


class PhiRotaryEmbedding(nn.Module):
    def __init__(self, config: PhiConfig):
        super().__init__()
        dim = int(config.head_dim * config.partial_rotary_factor)
        inv_freq = config.rope_theta ** -(torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(self.inv_freq) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


class PhiAttention(nn.Module):
    def __init__(self, config: PhiConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim)
        self.dense = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size)
        self.rotary_ndims = int(self.head_dim * config.partial_rotary_factor)
        self.q_layernorm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
        self.k_layernorm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, mask: Tensor, cache: DynamicCache):
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projected = (proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query_states, key_states, value_states = (x.view(hidden_shape).transpose(1, 2) for x in projected)
        query_states, key_states = self.q_layernorm(query_states), self.k_layernorm(key_states)
        parts = [self.rotary_ndims, self.head_dim - self.rotary_ndims]
        query_rot, query_pass = query_states.split(parts, dim=-1)
        key_rot, key_pass = key_states.split(parts, dim=-1)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, *position_embeddings)
        query_states = torch.cat((query_rot, query_pass), dim=-1)
        key_states = torch.cat((key_rot, key_pass), dim=-1)
        cached = cache.update(key_states, value_states, self.layer_idx)
        key_states, value_states = (repeat_kv(states, self.num_key_value_groups) for states in cached)
        attn_weights = query_states @ key_states.transpose(2, 3) * self.scaling + mask
        attn_output = attn_weights.softmax(dim=-1) @ value_states
        return self.dense(attn_output.transpose(1, 2).flatten(2))


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))))


class PhiMLP(nn.Module):
    def __init__(self, config: PhiConfig):
        super().__init__()
        self.activation_fn = NewGELUActivation()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


class PhiDecoderLayer(nn.Module):
    def __init__(self, config: PhiConfig, layer_idx: int):
        super().__init__()
        self.self_attn, self.mlp = PhiAttention(config, layer_idx), PhiMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, *rest) -> Tensor:
        residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        return self.self_attn(hidden_states, *rest) + self.mlp(hidden_states) + residual


class PhiModel(nn.Module):
    """Words, as many as ``position_ids``, after those of the cache -> their states [N, T, D]."""

    def __init__(self, config: PhiConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PhiDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.rotary_emb = PhiRotaryEmbedding(config)
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def _causal_mask(self, attention_mask: Tensor, hidden_states: Tensor) -> Tensor:
        """What is added to the scores [N, 1, T, S]; a row that would see nothing sees all."""
        places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        visible = (places <= places[-hidden_states.shape[1] :, None]) & attention_mask[:, None].bool()
        visible = visible | ~visible.any(-1, keepdim=True)
        mask = hidden_states.new_zeros(visible.shape)
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[:, None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: DynamicCache):
        hidden_states = self.embed_tokens(input_ids)
        shared = self.rotary_emb(position_ids), self._causal_mask(attention_mask, hidden_states), cache
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, *shared)
        return self.final_layernorm(hidden_states)


class PhiForCausalLM(nn.Module):
    """A prompt, padded on the left, and what goes on behind it -> the logits of both."""

    def __init__(self, config: PhiConfig | None = None):
        super().__init__()
        config = config or PhiConfig()
        self.model = PhiModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.7, 1.6)
                nn.init.normal_(module.bias, std=0.3)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        cache, length = DynamicCache(), input_ids.shape[1]
        whole = torch.cat([attention_mask, torch.ones_like(continuation)], dim=1)
        position_ids = (whole.cumsum(-1) - 1).masked_fill(whole == 0, 1)
        prompt = self.model(input_ids, attention_mask, position_ids[:, :length], cache)
        states = self.model(continuation, whole, position_ids[:, length:], cache)
        return {"prompt_logits": self.lm_head(prompt), "logits": self.lm_head(states)}


def counted() -> tuple[dict[str, Tensor], Tensor]:
    """Texts that count up by their own steps; the mark of their start fills the places before it too."""
    total, words = PROMPT + MORE, PhiConfig.vocab_size - 1
    text = torch.full((ROWS, total + 1), END_OF_TEXT)
    pads = torch.randperm(ROWS)
    for row, pad in enumerate(pads.tolist()):
        steps = torch.randint(1, 4, ()) * torch.arange(total - pad)
        text[row, pad + 1 :] = 1 + (torch.randint(words, ()) + steps) % words
    real = torch.arange(total) >= pads[:, None]
    given = text[:, :PROMPT], real[:, :PROMPT].long(), text[:, PROMPT:total]
    names = ("input_ids", "attention_mask", "continuation")
    return dict(zip(names, given, strict=True)), text[:, 1:].masked_fill(~real, IGNORED)


def next_words(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    logits = torch.cat([outputs["prompt_logits"], outputs["logits"]], dim=1)
    return F.cross_entropy(logits.mT, labels, ignore_index=IGNORED)
