"""A small Gemma 2: sandwiched norms, capped scores and logits, a sliding window in every other layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, INNER, LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 61, 28, 44, 4, 6, 2, 8
WINDOW, SCALAR, SCORE_CAP, LOGIT_CAP, THETA, EPS = 5, 20, 3.0, 5.0, 10000.0, 1e-6
TEXTS, LENGTH, PAD, IGNORED = 7, 13, 0, -100


class Gemma2RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = EPS):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(0.3 * torch.randn(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)


class Gemma2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Gemma2RotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(x) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    return hidden_states.repeat_interleave(n_rep, dim=1)


class Gemma2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_key_value_groups = HEADS // KEY_HEADS
        self.scaling = SCALAR**-0.5
        self.attn_logit_softcapping = SCORE_CAP
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, HEAD_DIM)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = torch.tanh(attn_weights / self.attn_logit_softcapping) * self.attn_logit_softcapping
        attn_weights = F.softmax(attn_weights + attention_mask, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2)
        return self.o_proj(attn_output.flatten(2))


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.is_sliding = not bool(layer_idx % 2)
        self.sliding_window = WINDOW
        self.self_attn = Gemma2Attention()
        self.mlp = Gemma2MLP()
        self.input_layernorm = Gemma2RMSNorm(WIDTH)
        self.post_attention_layernorm = Gemma2RMSNorm(WIDTH)
        self.pre_feedforward_layernorm = Gemma2RMSNorm(WIDTH)
        self.post_feedforward_layernorm = Gemma2RMSNorm(WIDTH)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> Tensor:
        if self.is_sliding:
            outside = torch.ones_like(attention_mask, dtype=torch.bool).tril(diagonal=-self.sliding_window)
            min_dtype = torch.finfo(attention_mask.dtype).min
            attention_mask = torch.where(outside, min_dtype, attention_mask)
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, position_embeddings, attention_mask)
        hidden_states = residual + self.post_attention_layernorm(hidden_states)
        residual = hidden_states
        hidden_states = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return residual + self.post_feedforward_layernorm(hidden_states)


class Gemma2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH, PAD)
        self.layers = nn.ModuleList(Gemma2DecoderLayer(i) for i in range(LAYERS))
        self.norm = Gemma2RMSNorm(WIDTH)
        self.rotary_emb = Gemma2RotaryEmbedding()

    def _update_causal_mask(self, attention_mask: Tensor, hidden_states: Tensor) -> Tensor:
        length = attention_mask.shape[1]
        min_dtype = torch.finfo(hidden_states.dtype).min
        causal_mask = hidden_states.new_full((length, length), min_dtype).triu(diagonal=1)
        return causal_mask.masked_fill(attention_mask[:, None, None, :] == 0, min_dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        causal_mask = self._update_causal_mask(attention_mask, hidden_states)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        hidden_states = hidden_states * WIDTH**0.5
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, position_embeddings, causal_mask)
        return self.norm(hidden_states)


class Gemma2ForCausalLM(nn.Module):
    """Tokens and their mask -> capped logits."""

    def __init__(self):
        super().__init__()
        self.model = Gemma2Model()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.3 * module.in_features**-0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.25)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.lm_head(self.model(input_ids, attention_mask))
        return torch.tanh(logits / LOGIT_CAP) * LOGIT_CAP


def progressions() -> tuple[dict[str, Tensor], Tensor]:
    """Texts that count on by steps of their own, a tenth of the tokens noise, padded by up to four tokens."""
    place = torch.arange(LENGTH)
    start, step = torch.randint(VOCAB - 1, (TEXTS, 1)), torch.randint(1, 5, (TEXTS, 1))
    noise = torch.randint(VOCAB - 1, (TEXTS, LENGTH))
    tokens = 1 + torch.where(torch.rand(TEXTS, LENGTH) < 0.1, noise, (start + step * place) % (VOCAB - 1))
    lengths = torch.randint(LENGTH - 4, LENGTH + 1, (TEXTS, 1))
    mask = (place < lengths).long()
    inputs = {"input_ids": tokens.where(mask == 1, PAD), "attention_mask": mask}
    return inputs, tokens.where(mask == 1, IGNORED)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of each next token, by four."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED) / 4
