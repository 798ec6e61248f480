"""A small LongT5: an encoder of local and transient-global attention, a decoder, and a tied head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, SIZE, INNER, BUCKETS, FAR = 61, 20, 3, 8, 28, 10, 8
BLOCK, GLOBAL, LONG, SHORT, TEXTS, PAD, START, EPS = 5, 4, 22, 9, 4, 0, 2, 1e-6


def drawn(layer: nn.Module, std: float) -> nn.Module:
    nn.init.normal_(layer.weight, std=std)
    return layer


def _relative_position_bucket(position: Tensor, bidirectional: bool) -> Tensor:
    num_buckets = BUCKETS // 2 if bidirectional else BUCKETS
    start = (position > 0) * num_buckets if bidirectional else 0
    far, exact = position.abs() if bidirectional else -position.clamp(max=0), num_buckets // 2
    ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(FAR / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return start + torch.where(far < exact, far, large)


def _split_into_blocks(x: Tensor) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, -x.shape[1] % BLOCK]).unflatten(1, (-1, BLOCK))


def _concatenate_3_blocks(x: Tensor) -> Tensor:
    padded = F.pad(x, [0, 0] * (x.ndim - 2) + [1, 1])
    return torch.cat([padded[:, i : i + x.shape[1]] for i in range(3)], 2)


def _get_local_attention_mask(mask: Tensor) -> Tensor:
    blocked = _split_into_blocks(mask)
    both = blocked[..., None] * _concatenate_3_blocks(blocked)[:, :, None]
    near = (torch.arange(-BLOCK, 2 * BLOCK) - torch.arange(BLOCK)[:, None]).abs() < BLOCK
    return (both.bool() & near)[:, :, None]


def _make_global_fixed_block_ids(mask: Tensor) -> tuple[Tensor, Tensor]:
    position = torch.arange(mask.shape[1])
    block_ids = torch.where(mask > 0, position // GLOBAL, -1)
    ends = (position % GLOBAL == GLOBAL - 1) & (block_ids >= 0)
    block_ids = torch.minimum(block_ids, ends.sum(1, keepdim=True) - 1)
    return block_ids, torch.arange(mask.shape[1] // GLOBAL) <= block_ids.amax(1, keepdim=True)


class LongT5LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


class LongT5DenseGatedActDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1 = (drawn(nn.Linear(WIDTH, INNER, bias=False), 0.22) for _ in range(2))
        self.wo = drawn(nn.Linear(INNER, WIDTH, bias=False), 0.19)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(x)) * self.wi_1(x))


class LongT5Attention(nn.Module):
    def __init__(self, biased: bool = False):
        super().__init__()
        self.q, self.k = (drawn(nn.Linear(WIDTH, HEADS * SIZE, bias=False), 0.13) for _ in range(2))
        self.v = drawn(nn.Linear(WIDTH, HEADS * SIZE, bias=False), 0.22)
        self.o = drawn(nn.Linear(HEADS * SIZE, WIDTH, bias=False), 0.2)
        self.relative_attention_bias = drawn(nn.Embedding(BUCKETS, HEADS), 0.5) if biased else None

    def compute_bias(self, memory: Tensor, context: Tensor, bidirectional: bool) -> Tensor | float:
        if self.relative_attention_bias is None:
            return 0.0
        buckets = _relative_position_bucket(memory - context[:, None], bidirectional)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None, states: Tensor | None = None):
        given, position = x if states is None else states, torch.arange(x.shape[1])
        q, k, v = (
            y.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for y in (self.q(x), self.k(given), self.v(given))
        )
        if bias is None:
            bias = self.compute_bias(position, position, False) + torch.where(mask, 0.0, -1e10).to(x)
        y = (q @ k.transpose(2, 3) + bias).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2)), bias


class LongT5LocalAttention(LongT5Attention):
    def attend(self, x: Tensor, bias: Tensor, side: Tensor) -> Tensor:
        q, k, v = (
            _split_into_blocks(layer(x).unflatten(2, (HEADS, SIZE))) for layer in (self.q, self.k, self.v)
        )
        side = side[:, None].expand(-1, q.shape[1], -1, -1)
        k = torch.cat([_concatenate_3_blocks(k), self.k(side).unflatten(3, (HEADS, SIZE))], 2)
        v = torch.cat([_concatenate_3_blocks(v), self.v(side).unflatten(3, (HEADS, SIZE))], 2)
        weights = (torch.einsum("...qhd,...khd->...hqk", q, k) + bias).softmax(-1)
        y = torch.einsum("...hqk,...khd->...qhd", weights, v)
        return self.o(y.flatten(1, 2)[:, : x.shape[1]].flatten(2))

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None):
        if bias is None:
            bias = self.compute_bias(torch.arange(-BLOCK, 2 * BLOCK), torch.arange(BLOCK), True)
            bias = bias + torch.where(_get_local_attention_mask(mask), 0.0, -1e10).to(x)
        return self.attend(x, bias, x[:, :0]), bias


class LongT5TransientGlobalAttention(LongT5LocalAttention):
    def __init__(self):
        super().__init__()
        self.global_relative_attention_bias = drawn(nn.Embedding(BUCKETS, HEADS), 0.5)
        self.global_input_layer_norm = LongT5LayerNorm()

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor):
        (block_ids, used), place = _make_global_fixed_block_ids(mask), torch.arange(x.shape[1] // GLOBAL)
        one_hot = (block_ids[..., None] == place).to(x)
        mean = torch.einsum("nsd,nsg->ngd", x, one_hot) / one_hot.sum(1).clamp(min=1)[..., None]
        buckets = _relative_position_bucket(place - block_ids[..., None], True)
        masked = torch.where(used, 0.0, -1e10).to(x)[:, None, :, None]
        beside = _split_into_blocks(self.global_relative_attention_bias(buckets) + masked)
        both = torch.cat([bias, beside.permute(0, 1, 4, 2, 3)], -1)
        return self.attend(x, both, self.global_input_layer_norm(mean)), bias


class LongT5Layer(nn.Module):
    def __init__(self, name: str, inner: nn.Module):
        super().__init__()
        self.name, self.layer_norm = name, LongT5LayerNorm()
        self.add_module(name, inner)

    def forward(self, x: Tensor, *given: Tensor | None):
        y = self.get_submodule(self.name)(self.layer_norm(x), *given)
        return (x + y[0], y[1]) if isinstance(y, tuple) else x + y


class LongT5Block(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layer = nn.ModuleList([*layers, LongT5Layer("DenseReluDense", LongT5DenseGatedActDense())])

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None, *cross: Tensor):
        x, bias = self.layer[0](x, mask, bias)
        if cross:
            x, _ = self.layer[1](x, cross[1], None, cross[0])
        return self.layer[-1](x), bias


class LongT5Stack(nn.Module):
    def __init__(self, embed_tokens: nn.Embedding, blocks: list[nn.Module]):
        super().__init__()
        self.embed_tokens, self.block = embed_tokens, nn.ModuleList(blocks)
        self.final_layer_norm = LongT5LayerNorm()

    def forward(self, ids: Tensor, mask: Tensor, *cross: Tensor) -> Tensor:
        x, bias = self.embed_tokens(ids), None
        for block in self.block:
            x, bias = block(x, mask, bias, *cross)
        return self.final_layer_norm(x)


class LongT5ForConditionalGeneration(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, wrap = drawn(nn.Embedding(WORDS, WIDTH), 1.0), LongT5Layer
        local = [wrap("LocalSelfAttention", LongT5LocalAttention(i == 0)) for i in range(2)]
        layers = [*local, wrap("TransientGlobalSelfAttention", LongT5TransientGlobalAttention())]
        self.encoder = LongT5Stack(self.shared, [LongT5Block(layer) for layer in layers])
        pairs = [(LongT5Attention(i == 0), LongT5Attention()) for i in range(2)]
        blocks = [LongT5Block(wrap("SelfAttention", a), wrap("EncDecAttention", b)) for a, b in pairs]
        self.decoder = LongT5Stack(self.shared, blocks)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        states = self.encoder(input_ids, attention_mask)
        ids = F.pad(labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD), (1, 0), value=START)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return self.lm_head(
            self.decoder(ids, causal, states, attention_mask[:, None, None] > 0) * WIDTH**-0.5
        )


def texts() -> tuple[dict[str, Tensor], Tensor]:
    """Texts that count on by a step of their own; the labels are every other word of a part of them."""
    size, first, step = (torch.randint(*ends, (TEXTS, 1)) for ends in ((10, LONG), (0, 50), (1, 6)))
    words = 3 + (first + step * torch.arange(LONG) + torch.randint(2, (TEXTS, LONG))) % (WORDS - 3)
    mask = (torch.arange(LONG) < size).long()
    labels = words[:, : 2 * SHORT : 2].masked_fill(torch.arange(SHORT) >= size // 2 - 1, -100)
    return {"input_ids": words * mask + PAD * (1 - mask), "attention_mask": mask, "labels": labels}, labels


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) / 4
