"""A text-to-text transformer: relative position biases, root mean square norms, gated units, a tied head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D_MODEL, D_KV, HEADS, D_FF, LAYERS = 12, 5, 3, 20, 3
BUCKETS, MAX_DISTANCE = 8, 12
TOKENS, PAD, END, IGNORED = 14, 0, 1, -100
ROWS, SOURCE = 8, 13


def linear(width: int, out: int, std: float) -> nn.Linear:
    """A product without a shift, its weights normal with this deviation."""
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class T5LayerNorm(nn.Module):
    """Divides by the root of the mean square; the mean stays."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(0.6 + 0.8 * torch.rand(D_MODEL))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class T5Attention(nn.Module):
    """Attention without a scale; gives its position bias too, for the layers that follow to reuse."""

    def __init__(self, is_decoder: bool, has_relative_attention_bias: bool = False):
        super().__init__()
        self.is_decoder, self.n_heads, inner = is_decoder, HEADS, HEADS * D_KV
        self.has_relative_attention_bias = has_relative_attention_bias
        self.q = linear(D_MODEL, inner, (D_MODEL * D_KV) ** -0.5)
        self.k, self.v = (linear(D_MODEL, inner, D_MODEL**-0.5) for _ in range(2))
        self.o = linear(inner, D_MODEL, inner**-0.5)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

    def relative_position_bucket(self, relative_position: Tensor) -> Tensor:
        """Near distances have a bucket each, far ones share buckets that widen with the logarithm."""
        num_buckets, base = BUCKETS, 0
        if self.is_decoder:
            distance = -relative_position.clamp(max=0)
        else:
            num_buckets //= 2
            base = (relative_position > 0).long() * num_buckets
            distance = relative_position.abs()
        max_exact = num_buckets // 2
        ratio = torch.log(distance.clamp(min=max_exact).double() / max_exact)
        large = max_exact + (ratio / math.log(MAX_DISTANCE / max_exact) * (num_buckets - max_exact)).long()
        large = large.clamp(max=num_buckets - 1)
        return base + torch.where(distance < max_exact, distance, large)

    def compute_bias(self, query_length: int, key_length: int) -> Tensor:
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.relative_position_bucket(memory - context))
        return values.permute(2, 0, 1)[None]

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        source = hidden_states if key_value_states is None else key_value_states
        q, k, v = (
            states.view(len(states), -1, self.n_heads, D_KV).transpose(1, 2)
            for states in (self.q(hidden_states), self.k(source), self.v(source))
        )
        if position_bias is None:
            position_bias = mask
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(q.shape[2], k.shape[2]) + mask
        scores = torch.matmul(q, k.transpose(2, 3)) + position_bias
        mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.o(mixed.transpose(1, 2).reshape(len(mixed), -1, HEADS * D_KV)), position_bias


class T5DenseGatedActDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1 = (linear(D_MODEL, D_FF, D_MODEL**-0.5) for _ in range(2))
        self.wo, self.act = linear(D_FF, D_MODEL, D_FF**-0.5), nn.GELU(approximate="tanh")

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states))


class T5LayerSelfAttention(nn.Module):
    def __init__(self, is_decoder: bool, has_relative_attention_bias: bool):
        super().__init__()
        self.SelfAttention = T5Attention(is_decoder, has_relative_attention_bias)
        self.layer_norm = T5LayerNorm()

    def forward(self, hidden_states: Tensor, mask: Tensor, position_bias: Tensor | None):
        normed = self.layer_norm(hidden_states)
        output, position_bias = self.SelfAttention(normed, mask, position_bias=position_bias)
        return hidden_states + output, position_bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.EncDecAttention, self.layer_norm = T5Attention(is_decoder=True), T5LayerNorm()

    def forward(self, hidden_states: Tensor, key_value_states: Tensor, mask: Tensor) -> Tensor:
        return hidden_states + self.EncDecAttention(self.layer_norm(hidden_states), mask, key_value_states)[0]


class T5LayerFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.DenseReluDense, self.layer_norm = T5DenseGatedActDense(), T5LayerNorm()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.DenseReluDense(self.layer_norm(hidden_states))


class T5Block(nn.Module):
    def __init__(self, is_decoder: bool, has_relative_attention_bias: bool):
        super().__init__()
        self.layer = nn.ModuleList([T5LayerSelfAttention(is_decoder, has_relative_attention_bias)])
        if is_decoder:
            self.layer.append(T5LayerCrossAttention())
        self.layer.append(T5LayerFF())

    def forward(self, hidden_states, mask, position_bias=None, memory=None, memory_mask=None):
        hidden_states, position_bias = self.layer[0](hidden_states, mask, position_bias)
        if memory is not None:
            hidden_states = self.layer[1](hidden_states, memory, memory_mask)
        return self.layer[-1](hidden_states), position_bias


class T5Stack(nn.Module):
    def __init__(self, is_decoder: bool):
        super().__init__()
        self.block = nn.ModuleList(T5Block(is_decoder, i == 0) for i in range(LAYERS))
        self.final_layer_norm = T5LayerNorm()

    def forward(self, hidden_states, mask, memory=None, memory_mask=None) -> Tensor:
        position_bias = None
        for block in self.block:
            hidden_states, position_bias = block(hidden_states, mask, position_bias, memory, memory_mask)
        return self.final_layer_norm(hidden_states)


class T5ForConditionalGeneration(nn.Module):
    """Tokens [N, S], which of them are real [N, S] and labels [N, T] -> scores [N, T, TOKENS]."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(TOKENS, D_MODEL)
        self.encoder, self.decoder = T5Stack(is_decoder=False), T5Stack(is_decoder=True)
        self.lm_head = nn.Linear(D_MODEL, TOKENS, bias=False)
        self.lm_head.weight = self.shared.weight

    def shift_right(self, labels: Tensor) -> Tensor:
        shifted = torch.full_like(labels, PAD)
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == IGNORED, PAD)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        embeds = self.shared(input_ids)
        lowest = torch.finfo(embeds.dtype).min
        mask = (1 - attention_mask[:, None, None, :].to(embeds.dtype)) * lowest
        memory = self.encoder(embeds, mask)
        embeds = self.shared(self.shift_right(labels))
        causal = embeds.new_ones(labels.shape[1], labels.shape[1]).tril()
        output = self.decoder(embeds, (1 - causal)[None, None] * lowest, memory, mask)
        return self.lm_head(output * D_MODEL**-0.5)


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of several lengths, to be said again without their first two words."""
    lengths = torch.randint(6, SOURCE + 1, (ROWS, 1))
    mask = (torch.arange(SOURCE) < lengths).long()
    ids = (torch.randint(END + 1, TOKENS, (ROWS, SOURCE)) * mask).scatter(1, lengths - 1, END)
    labels = ids[:, 2:].masked_fill(mask[:, 2:] == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, labels


def surprise(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
