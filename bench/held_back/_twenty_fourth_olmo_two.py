"""A small OLMo 2: norms after the branches and of all queries and keys, grouped heads, rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 61, 36, 52, 4
HEADS, KEY_HEADS, HEAD, THETA, EPS = 6, 2, 8, 500000.0, 1e-5
SENTENCES, LENGTH, PAD, IGNORED = 5, 19, 1, -100


def linear(inward: int, outward: int, std: float) -> nn.Linear:
    layer = nn.Linear(inward, outward, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class Olmo2RMSNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden_size))
        self.variance_epsilon = EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


class Olmo2RotaryEmbedding(nn.Module):
    """Cosines and sines of the angles of each position, [N, T, head]."""

    def __init__(self):
        super().__init__()
        inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq[None, :, None].expand(len(position_ids), -1, 1)
        freqs = (inv_freq @ position_ids[:, None, :].to(inv_freq)).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[N, key heads, T, head] -> [N, heads, T, head]: each key head comes n_rep times in a row."""
    n, heads, length, head = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(n, heads, n_rep, length, head)
    return hidden_states.reshape(n, heads * n_rep, length, head)


def create_causal_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, [N, 1, T, T]: the least number for later tokens and padding, or nothing."""
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    allowed = causal & attention_mask[:, None, None, :].bool()
    zero = torch.zeros((), dtype=dtype, device=attention_mask.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)


class Olmo2Attention(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx, self.head_dim, self.scaling = layer_idx, HEAD, HEAD**-0.5
        self.num_key_value_groups = HEADS // KEY_HEADS
        self.q_proj = linear(HIDDEN, HEADS * HEAD, 0.12)
        self.k_proj = linear(HIDDEN, KEY_HEADS * HEAD, 0.12)
        self.v_proj = linear(HIDDEN, KEY_HEADS * HEAD, 0.08)
        self.o_proj = linear(HEADS * HEAD, HIDDEN, 0.03)
        self.q_norm = Olmo2RMSNorm(HEADS * HEAD)
        self.k_norm = Olmo2RMSNorm(KEY_HEADS * HEAD)

    def forward(self, hidden_states: Tensor, embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        input_shape = hidden_states.shape[:-1]
        query_states = self.q_norm(self.q_proj(hidden_states))
        key_states = self.k_norm(self.k_proj(hidden_states))
        value_states = self.v_proj(hidden_states)

        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = query_states.view(hidden_shape).transpose(1, 2)
        key_states = key_states.view(hidden_shape).transpose(1, 2)
        value_states = value_states.view(hidden_shape).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, *embeddings)

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = query_states @ key_states.transpose(2, 3) * self.scaling + mask
        attn_output = attn_weights.softmax(-1) @ value_states
        return self.o_proj(attn_output.transpose(1, 2).reshape(*input_shape, -1))


class Olmo2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = linear(HIDDEN, INTERMEDIATE, 0.13)
        self.up_proj = linear(HIDDEN, INTERMEDIATE, 0.13)
        self.down_proj = linear(INTERMEDIATE, HIDDEN, 0.1)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.self_attn = Olmo2Attention(layer_idx)
        self.mlp = Olmo2MLP()
        self.post_attention_layernorm = Olmo2RMSNorm(HIDDEN)
        self.post_feedforward_layernorm = Olmo2RMSNorm(HIDDEN)

    def forward(self, hidden_states: Tensor, embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.self_attn(hidden_states, embeddings, mask)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return residual + hidden_states


class Olmo2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN, PAD)
        nn.init.normal_(self.embed_tokens.weight, std=0.6)
        self.layers = nn.ModuleList(Olmo2DecoderLayer(i) for i in range(LAYERS))
        self.norm = Olmo2RMSNorm(HIDDEN)
        self.rotary_emb = Olmo2RotaryEmbedding()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        causal_mask = create_causal_mask(attention_mask, hidden_states.dtype)
        position_embeddings = self.rotary_emb(position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, position_embeddings, causal_mask)
        return self.norm(hidden_states)


class Olmo2ForCausalLM(nn.Module):
    """Tokens and which of them are no padding, [N, T] -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.model = Olmo2Model()
        self.lm_head = linear(HIDDEN, VOCABULARY, 0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask))


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Sentences that count in steps of their own, now and then a slip; padded at the left or at the right."""
    lengths = torch.randint(LENGTH // 2, LENGTH - 1, (SENTENCES, 1))
    left = torch.arange(SENTENCES)[:, None] % 2 == 0
    place = torch.arange(LENGTH) - torch.where(left, LENGTH - lengths, 0)
    mask = (place >= 0) & (place < lengths)
    start, stride = torch.randint(59, (SENTENCES, 1)), torch.randint(1, 6, (SENTENCES, 1))
    slip = torch.randint(59, (SENTENCES, LENGTH)) * (torch.rand(SENTENCES, LENGTH) < 0.1)
    tokens = torch.where(mask, 2 + (start + stride * place + slip) % 59, PAD)
    labels = torch.full_like(tokens, IGNORED)
    both = mask[:, 1:] & mask[:, :-1]
    labels[:, :-1] = torch.where(both, tokens[:, 1:], IGNORED)
    return {"input_ids": tokens, "attention_mask": mask.long()}, labels


def next_token_and_z(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of the next token, and a little of the squared logarithm of the partition."""
    z = logits.logsumexp(-1)[labels != IGNORED].square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED) + 1e-3 * z
