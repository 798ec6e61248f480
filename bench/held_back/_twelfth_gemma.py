"""A small Gemma-2 for causal language modelling, module by module as in transformers, eager attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class Gemma2Config:
    vocab_size: int = 37
    hidden_size: int = 24
    intermediate_size: int = 40
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    query_pre_attn_scalar: int = 12
    sliding_window: int = 4
    final_logit_softcapping: float = 8.0
    attn_logit_softcapping: float = 5.0
    pad_token_id: int = 0
    bos_token_id: int = 2

    @property
    def layer_types(self) -> list[str]:
        kinds = ("full_attention", "sliding_attention")
        return [kinds[(i + 1) % 2] for i in range(self.num_hidden_layers)]


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and cap count."""
    if isinstance(module, Gemma2RMSNorm):
        nn.init.uniform_(module.weight, -0.4, 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1.5 * module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.6)


class Gemma2RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class Gemma2MLP(nn.Module):
    def __init__(self, config: Gemma2Config):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gemma2RotaryEmbedding(nn.Module):
    def __init__(self, config: Gemma2Config):
        super().__init__()
        steps = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.register_buffer("inv_freq", 1.0 / config.rope_theta**steps, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(x.dtype) * self.inv_freq.to(x.dtype)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """[N, key heads, T, d] -> [N, heads, T, d]; neighbours share a key head."""
    return x[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


def create_mask(attention_mask: Tensor, dtype: torch.dtype, sliding_window: int | None = None) -> Tensor:
    """Zero where a key is seen and the lowest number elsewhere, [N, 1, T, T]."""
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    allowed = index[None, :] <= index[:, None]
    if sliding_window is not None:
        allowed = allowed & (index[None, :] > index[:, None] - sliding_window)
    allowed = allowed & attention_mask[:, None, None, :].bool()
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


class Gemma2Attention(nn.Module):
    def __init__(self, config: Gemma2Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.query_pre_attn_scalar**-0.5
        self.attn_logit_softcapping = config.attn_logit_softcapping
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (project(x).view(shape).transpose(1, 2) for project in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (repeat_kv(y, self.num_key_value_groups) for y in (key, value))
        weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        weights = torch.tanh(weights / self.attn_logit_softcapping) * self.attn_logit_softcapping
        weights = F.softmax(weights + mask, dim=-1)
        return self.o_proj(torch.matmul(weights, value).transpose(1, 2).flatten(2))


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, config: Gemma2Config, layer_idx: int):
        super().__init__()
        self.attention_type = config.layer_types[layer_idx]
        self.self_attn, self.mlp = Gemma2Attention(config), Gemma2MLP(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Gemma2RMSNorm(hidden, eps)
        self.post_attention_layernorm = Gemma2RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = Gemma2RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = Gemma2RMSNorm(hidden, eps)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        residual = x
        x = self.self_attn(self.input_layernorm(x), position_embeddings, mask)
        x = residual + self.post_attention_layernorm(x)
        residual = x
        x = self.mlp(self.pre_feedforward_layernorm(x))
        return residual + self.post_feedforward_layernorm(x)


class Gemma2Model(nn.Module):
    def __init__(self, config: Gemma2Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Gemma2DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Gemma2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Gemma2RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        masks = {
            "full_attention": create_mask(attention_mask, x.dtype),
            "sliding_attention": create_mask(attention_mask, x.dtype, self.config.sliding_window),
        }
        position_ids = torch.arange(x.shape[1], device=x.device)[None]
        position_embeddings = self.rotary_emb(x, position_ids)
        x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, position_embeddings, masks[layer.attention_type])
        return self.norm(x)


class Gemma2ForCausalLM(nn.Module):
    """Tokens and their mask, [N, T] -> logits [N, T, V]; the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.config = config = Gemma2Config()
        self.model = Gemma2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(varied)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.lm_head(self.model(input_ids, attention_mask))
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Four sequences padded on the left, as Gemma's tokenizer does; their first token is no label."""
    config, index, start = Gemma2Config(), torch.arange(12), torch.tensor([[0], [2], [3], [5]])
    tokens = torch.randint(3, config.vocab_size, (4, 12))
    tokens = tokens.masked_fill(index == start, config.bos_token_id)
    tokens = tokens.masked_fill(index < start, config.pad_token_id)
    inputs = {"input_ids": tokens, "attention_mask": (index >= start).long()}
    return inputs, tokens.masked_fill(index <= start, IGNORED)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
