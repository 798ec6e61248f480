"""A small RecurrentGemma: gated linear recurrences and one local attention, on rows of several documents."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LRU, INNER = 32, 24, 3, 30, 36
WINDOW, TAPS, CAP, BASE, LENGTH = 5, 4, 6.0, 10000.0, 14
BLOCK_TYPES = ("recurrent", "recurrent", "attention", "recurrent")
STEEPEST = 1000.0


class SqrtBoundDerivative(torch.autograd.Function):
    """A square root whose slope is never more than ``STEEPEST``."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (4.0 * x).clamp_min(STEEPEST**-2).sqrt()


class RecurrentGemmaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(0.3 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return x * (1.0 + self.weight)


class RecurrentGemmaRotaryEmbedding(nn.Module):
    def __init__(self, dim: int, base: float = BASE):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None].to(x) * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [N, heads, T, dim]: each entry of the first half with its fellow of the second."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class RecurrentGemmaSdpaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * self.head_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, self.head_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, self.head_dim, bias=False)
        self.o_proj = nn.Linear(HEADS * self.head_dim, WIDTH)
        self.rotary_emb = RecurrentGemmaRotaryEmbedding(self.head_dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary_emb(value, position_ids)
        (query, query_pass), (key, key_pass) = query.chunk(2, -1), key.chunk(2, -1)
        query = torch.cat([rotated(query, cos, sin), query_pass], -1)
        key = torch.cat([rotated(key, cos, sin), key_pass], -1)
        key, value = (part.expand(-1, HEADS, -1, -1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=self.head_dim**-0.5)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class RecurrentGemmaRglru(nn.Module):
    def __init__(self):
        super().__init__()
        block = LRU // HEADS
        self.recurrent_param = nn.Parameter(torch.empty(LRU).uniform_(0.5, 0.98).log().div(-8).expm1().log())
        self.input_gate_weight = nn.Parameter(torch.randn(HEADS, block, block) / block**0.5)
        self.input_gate_bias = nn.Parameter(0.4 * torch.randn(HEADS, block))
        self.recurrent_gate_weight = nn.Parameter(torch.randn(HEADS, block, block) / block**0.5)
        self.recurrent_gate_bias = nn.Parameter(0.4 * torch.randn(HEADS, block))

    def _gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        blocks = x.reshape(-1, *bias.shape).transpose(0, 1)
        return torch.baddbmm(bias[:, None], blocks, weight).transpose(0, 1).reshape(x.shape).sigmoid()

    def _rnn_scan(self, x: Tensor, gate: Tensor, reset: Tensor) -> Tensor:
        gate = gate * ~reset
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + x[:, t]
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, activations: Tensor, position_ids: Tensor) -> Tensor:
        reset = position_ids[:, :, None] == 0
        input_gate = self._gate(activations, self.input_gate_weight, self.input_gate_bias)
        recurrent_gate = self._gate(activations, self.recurrent_gate_weight, self.recurrent_gate_bias)
        decay = torch.exp(recurrent_gate * F.softplus(self.recurrent_param) * -8.0)
        scale = SqrtBoundDerivative.apply(1 - decay.square()).masked_fill(reset, 1.0)
        return self._rnn_scan(activations * input_gate * scale, decay, reset)


class RecurrentGemmaRecurrentBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_y, self.linear_x = nn.Linear(WIDTH, LRU), nn.Linear(WIDTH, LRU)
        self.linear_out = nn.Linear(LRU, WIDTH)
        self.conv_1d = nn.Conv1d(LRU, LRU, TAPS, groups=LRU, padding=TAPS - 1)
        self.rg_lru, self.act_fn = RecurrentGemmaRglru(), nn.GELU("tanh")

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.act_fn(self.linear_y(x))
        x = self.conv_1d(self.linear_x(x).transpose(1, 2))[..., : x.shape[1]]
        return self.linear_out(self.rg_lru(x.transpose(1, 2), position_ids) * y)


class RecurrentGemmaMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down_proj, self.act_fn = nn.Linear(INNER, WIDTH), nn.GELU("tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class RecurrentGemmaDecoderLayer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.temporal_pre_norm, self.channel_pre_norm = (RecurrentGemmaRMSNorm(WIDTH) for _ in range(2))
        blocks = {"recurrent": RecurrentGemmaRecurrentBlock, "attention": RecurrentGemmaSdpaAttention}
        self.temporal_block, self.mlp_block = blocks[kind](), RecurrentGemmaMlp()

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = x + self.temporal_block(self.temporal_pre_norm(x), position_ids, attention_mask)
        return x + self.mlp_block(self.channel_pre_norm(x))


class RecurrentGemmaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(RecurrentGemmaDecoderLayer(kind) for kind in BLOCK_TYPES)
        self.final_norm = RecurrentGemmaRMSNorm(WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) * math.sqrt(WIDTH)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().triu(1 - WINDOW)
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        return self.final_norm(x)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer and bias count."""
    if isinstance(module, nn.Linear | nn.Conv1d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


class RecurrentGemmaForCausalLM(nn.Module):
    """Token ids and positions [N, T] -> logits of the next token, capped; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = RecurrentGemmaModel(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(varied)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.3)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = self.lm_head(self.model(input_ids, position_ids))
        return CAP * torch.tanh(logits / CAP)


def packed() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two rows of short documents, the first of one row cut off; tokens mostly follow from the one before."""
    positions = torch.zeros(2, LENGTH, dtype=torch.long)
    for row, start in enumerate((0, 2)):
        cut = int(torch.randint(4, 6, ()))
        ends = [cut, cut + int(torch.randint(4, 6, ()))]
        spans = (range(start, start + cut), range(ends[1] - cut), range(LENGTH - ends[1]))
        positions[row] = torch.tensor([place for span in spans for place in span])
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1))
    for t in range(1, LENGTH + 1):
        ids[:, t] = torch.where(torch.rand(2) < 0.3, ids[:, t], (5 * ids[:, t - 1] + 3) % VOCABULARY)
    last = F.pad(positions[:, 1:] == 0, (0, 1), value=False)
    return (ids[:, :-1], positions), ids[:, 1:].masked_fill(last, -100)


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the ends of documents left out."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
