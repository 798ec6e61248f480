"""A small BitNet b1.58: a decoder of ternary weights and activations of 8 bits, trained straight through."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KEYS, HEAD = 37, 20, 46, 3, 4, 2, 6
SEQUENCES, LONG, THETA, EPS, IGNORED = 5, 7, 500.0, 1e-5, -100


class WeightQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        scale = 1.0 / weight.abs().mean().clamp(min=1e-5)
        return (weight * scale).round().clamp(-1, 1) / scale

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output.clone()


class ActQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation: Tensor) -> Tensor:
        scale = 127 / activation.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-5)
        return (activation * scale).round().clamp(-128, 127) / scale

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output.clone()


class BitNetRMSNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden_size))
        self.variance_epsilon = EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class AutoBitLinear(nn.Linear):
    """A linear layer; its weights, as trained ones, lie about three values."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.rms_norm = BitNetRMSNorm(in_features)
        steps = torch.randint(-1, 2, self.weight.shape) + 0.12 * torch.randn(self.weight.shape)
        self.weight = nn.Parameter(steps / in_features**0.5)

    def forward(self, input: Tensor) -> Tensor:
        input = self.rms_norm(input)
        return F.linear(ActQuant.apply(input), WeightQuant.apply(self.weight))


class ReLUSquaredActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return torch.square(F.relu(input))


class BitNetMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = AutoBitLinear(WIDTH, INNER), AutoBitLinear(WIDTH, INNER)
        self.down_proj, self.act_fn = AutoBitLinear(INNER, WIDTH), ReLUSquaredActivation()
        self.ffn_sub_norm = BitNetRMSNorm(INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ffn_sub_norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(states: Tensor, n_rep: int) -> Tensor:
    return states[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


class BitNetAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = AutoBitLinear(WIDTH, HEADS * HEAD), AutoBitLinear(WIDTH, KEYS * HEAD)
        self.v_proj, self.o_proj = AutoBitLinear(WIDTH, KEYS * HEAD), AutoBitLinear(HEADS * HEAD, WIDTH)
        self.attn_sub_norm = BitNetRMSNorm(HEADS * HEAD)
        self.scaling = HEAD**-0.5

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(hidden_states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in projections)
        cos, sin = (x[:, None] for x in position_embeddings)
        q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
        k, v = repeat_kv(k, HEADS // KEYS), repeat_kv(v, HEADS // KEYS)
        scores = (q @ k.transpose(2, 3)) * self.scaling + attention_mask
        output = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o_proj(self.attn_sub_norm(output))


class BitNetDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = BitNetAttention(), BitNetMLP()
        self.input_layernorm, self.post_attention_layernorm = BitNetRMSNorm(WIDTH), BitNetRMSNorm(WIDTH)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, position_embeddings, attention_mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class BitNetRotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", THETA ** -(torch.arange(0, HEAD, 2) / HEAD), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[..., None] * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


class BitNetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_tokens.weight = nn.Parameter(0.35 * torch.randn(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList(BitNetDecoderLayer() for _ in range(LAYERS))
        self.norm, self.rotary_emb = BitNetRMSNorm(WIDTH), BitNetRotaryEmbedding()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        seen = (position_ids[0][:, None] >= position_ids) & attention_mask[:, None, None].bool()
        mask = torch.zeros_like(seen, dtype=hidden_states.dtype).masked_fill(~seen, -torch.inf)
        position_embeddings = self.rotary_emb(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, mask)
        return self.norm(hidden_states)


class BitNetForCausalLM(nn.Module):
    """Tokens and which of them are no padding, at the right -> logits; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.model = BitNetModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask))


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Sequences that count by a step of their own, some padded with token 0, and their next tokens."""
    start, step = torch.randint(VOCABULARY - 1, (SEQUENCES, 1)), torch.randint(1, 5, (SEQUENCES, 1))
    tokens = 1 + (start + step * torch.arange(LONG + 1)) % (VOCABULARY - 1)
    mask = (torch.arange(LONG) < torch.randint(LONG - 3, LONG + 1, (SEQUENCES, 1))).long()
    inputs = {"input_ids": tokens[:, :-1] * mask, "attention_mask": mask}
    return inputs, tokens[:, 1:].masked_fill(mask == 0, IGNORED)


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of the next token where there is one, by eight."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED) / 8
