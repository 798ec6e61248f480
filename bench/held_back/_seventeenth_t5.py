"""A tiny T5 v1.1: relative position buckets, norms without a mean, gated units, a head of its own."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, END, FIRST_WORD, LONGEST, ROWS = -100, 1, 4, 12, 4


@dataclass
class T5Config:
    vocab_size: int = 20
    d_model: int = 16
    d_kv: int = 6
    d_ff: int = 20
    num_heads: int = 3
    num_layers: int = 3
    num_decoder_layers: int = 2
    relative_attention_num_buckets: int = 8
    relative_attention_max_distance: int = 10
    layer_norm_epsilon: float = 1e-6
    pad_token_id: int = 0
    decoder_start_token_id: int = 0


class T5LayerNorm(nn.Module):
    """To a mean square of one, then a gain; nothing is subtracted or added."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.d_model).uniform_(0.6, 1.4))
        self.variance_epsilon = config.layer_norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class T5DenseGatedActDense(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(config.d_model, config.d_ff, bias=False) for _ in range(2))
        self.wo, self.act = nn.Linear(config.d_ff, config.d_model, bias=False), NewGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(x)) * self.wi_1(x))


class T5LayerFF(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.DenseReluDense, self.layer_norm = T5DenseGatedActDense(config), T5LayerNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Attention(nn.Module):
    """Scores without a scale, plus what is handed in or, in a first block, made of distances and mask."""

    def __init__(self, config: T5Config, bidirectional: bool, has_relative_attention_bias: bool = False):
        super().__init__()
        self.bidirectional, self.n_heads = bidirectional, config.num_heads
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance, inner = config.relative_attention_max_distance, config.num_heads * config.d_kv
        self.q, self.k, self.v = (nn.Linear(config.d_model, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.relative_attention_bias = None
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(self.num_buckets, config.num_heads)

    def bucket(self, relative_position: Tensor) -> Tensor:
        """A bucket for each near distance; beyond half of them, wider ones up to the largest distance."""
        count, start = self.num_buckets, torch.zeros_like(relative_position)
        if self.bidirectional:
            count = count // 2
            start = start + count * (relative_position > 0)
            distance = relative_position.abs()
        else:
            distance = (-relative_position).clamp(min=0)
        exact = count // 2
        growth = (distance.clamp(min=1).double() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return start + distance.where(distance < exact, far)

    def compute_bias(self, length: int) -> Tensor:
        place = torch.arange(length, device=self.q.weight.device)
        buckets = self.bucket(place[None, :] - place[:, None])
        return self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(
        self, x: Tensor, mask: Tensor, states: Tensor | None = None, position_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        source = x if states is None else states
        query, key, value = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        if position_bias is None:
            position_bias = mask
            if self.relative_attention_bias is not None:
                position_bias = self.compute_bias(x.shape[1]) + mask
        weights = (query @ key.mT + position_bias).softmax(dim=-1)
        return self.o((weights @ value).transpose(1, 2).flatten(2)), position_bias


class T5LayerSelfAttention(nn.Module):
    def __init__(self, config: T5Config, bidirectional: bool, first: bool):
        super().__init__()
        self.SelfAttention = T5Attention(config, bidirectional, first)
        self.layer_norm = T5LayerNorm(config)

    def forward(self, x: Tensor, mask: Tensor, position_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        update, position_bias = self.SelfAttention(self.layer_norm(x), mask, position_bias=position_bias)
        return x + update, position_bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.EncDecAttention, self.layer_norm = T5Attention(config, False), T5LayerNorm(config)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        return x + self.EncDecAttention(self.layer_norm(x), mask, states)[0]


class T5Block(nn.Module):
    def __init__(self, config: T5Config, is_decoder: bool, first: bool):
        super().__init__()
        cross = [T5LayerCrossAttention(config)] if is_decoder else []
        attention = T5LayerSelfAttention(config, not is_decoder, first)
        self.layer = nn.ModuleList([attention, *cross, T5LayerFF(config)])

    def forward(self, x: Tensor, mask: Tensor, position_bias: Tensor | None, *memory: Tensor):
        x, position_bias = self.layer[0](x, mask, position_bias)
        if memory:
            x = self.layer[1](x, *memory)
        return self.layer[-1](x), position_bias


class T5Stack(nn.Module):
    def __init__(self, config: T5Config, embed_tokens: nn.Embedding, is_decoder: bool):
        super().__init__()
        self.embed_tokens = embed_tokens
        depth = config.num_decoder_layers if is_decoder else config.num_layers
        self.block = nn.ModuleList(T5Block(config, is_decoder, i == 0) for i in range(depth))
        self.final_layer_norm = T5LayerNorm(config)

    def forward(self, input_ids: Tensor, mask: Tensor, *memory: Tensor) -> Tensor:
        x, position_bias = self.embed_tokens(input_ids), None
        for block in self.block:
            x, position_bias = block(x, mask, position_bias, *memory)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    """Ids [N, S], which of them are real, labels [N, T] -> logits [N, T, V] and what was read [N, S, D]."""

    def __init__(self, config: T5Config | None = None):
        super().__init__()
        self.config = config = config or T5Config()
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared, is_decoder=False)
        self.decoder = T5Stack(config, self.shared, is_decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                shrink = config.d_kv if name.endswith(".q") else 1
                nn.init.normal_(module.weight, std=(module.in_features * shrink) ** -0.5)

    def shift_right(self, labels: Tensor) -> Tensor:
        ids = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return ids.masked_fill(ids == IGNORED, self.config.pad_token_id)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weight, length = self.lm_head.weight, labels.shape[1]
        lowest = torch.finfo(weight.dtype).min
        padding = (1 - attention_mask[:, None, None, :]).to(weight) * lowest
        future = weight.new_ones(length, length).triu(1)[None, None] * lowest
        memory = self.encoder(input_ids, padding)
        states = self.decoder(self.shift_right(labels), future, memory, padding)
        return {"logits": self.lm_head(states), "encoder_last_hidden_state": memory}


def tasks() -> tuple[dict[str, Tensor], Tensor]:
    """Words that count up under a prefix: say them again, or backwards; one row of full length."""
    ids, labels = torch.zeros(ROWS, LONGEST + 2).long(), torch.full((ROWS, LONGEST + 1), IGNORED)
    lengths = torch.cat([torch.tensor([LONGEST]), torch.randint(6, LONGEST, (ROWS - 1,))])
    for row, length in enumerate(lengths[torch.randperm(ROWS)].tolist()):
        start, step, back = torch.randint(16, ()), torch.randint(1, 4, ()), int(torch.randint(2, ()))
        words, end = FIRST_WORD + (start + step * torch.arange(length)) % 16, torch.tensor([END])
        ids[row, : length + 2] = torch.cat([torch.tensor([2 + back]), words, end])
        labels[row, : length + 1] = torch.cat([words.flip(0) if back else words, end])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}, labels


def surprise(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(outputs["logits"].mT, labels, ignore_index=IGNORED)
