"""A masked language model with disentangled attention over words and log-bucketed relative positions."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, INNER, LAYERS, LENGTH = 24, 16, 2, 24, 3, 14
BUCKETS, FARTHEST, SHARED, EPS = 8, 11, 1, 1e-7
PAD, MASK, IGNORED = 0, 1, -100


def log_bucket(offset: int) -> int:
    """Small offsets stay what they are, larger ones share buckets that widen with the distance."""
    middle = BUCKETS // 2
    if abs(offset) <= middle:
        return offset
    steps = math.log(abs(offset) / middle) / math.log((FARTHEST - 1) / middle) * (middle - 1)
    return int(math.copysign(math.ceil(steps) + middle, offset))


def initialise(model: nn.Module) -> None:
    """Start with lively weights, so that attention is far from even and no bias or gain is idle."""
    for name, weight in model.named_parameters():
        mean, std = float(name.endswith("LayerNorm.weight")), 0.35 if weight.dim() == 2 else 0.2
        nn.init.normal_(weight, mean, std)


class DebertaV2Embeddings(nn.Module):
    """Words, normed, with zeros at the padding; and the absolute positions, which the head needs."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.LayerNorm(self.word_embeddings(input_ids))
        positions = self.position_embeddings(torch.arange(input_ids.shape[1], device=input_ids.device))
        return embeddings * mask.unsqueeze(-1).to(embeddings.dtype), positions


class DisentangledSelfAttention(nn.Module):
    def __init__(self, share_att_key: bool):
        super().__init__()
        self.share_att_key = share_att_key
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if not share_att_key:
            self.pos_key_proj, self.pos_query_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

    def disentangled_attention_bias(
        self, query: Tensor, key: Tensor, relative_pos: Tensor, rel_embeddings: Tensor, scale: float
    ) -> Tensor:
        if self.share_att_key:
            pos_key, pos_query = self.key_proj(rel_embeddings), self.query_proj(rel_embeddings)
        else:
            pos_key, pos_query = self.pos_key_proj(rel_embeddings), self.pos_query_proj(rel_embeddings)
        pos_key, pos_query = self.transpose_for_scores(pos_key), self.transpose_for_scores(pos_query)
        shape, last = (len(query), HEADS, -1, -1), 2 * BUCKETS - 1
        c2p_pos = (relative_pos + BUCKETS).clamp(0, last).expand(shape)
        c2p = (query @ pos_key.transpose(-1, -2)).gather(-1, c2p_pos)
        p2c_pos = (BUCKETS - relative_pos).clamp(0, last).expand(shape)
        p2c = (key @ pos_query.transpose(-1, -2)).gather(-1, p2c_pos).transpose(-1, -2)
        return c2p / scale + p2c / scale

    def forward(
        self, hidden: Tensor, mask: Tensor, query_states: Tensor, relative_pos: Tensor, rel_embeddings: Tensor
    ) -> Tensor:
        query = self.transpose_for_scores(self.query_proj(query_states))
        key = self.transpose_for_scores(self.key_proj(hidden))
        value = self.transpose_for_scores(self.value_proj(hidden))
        scale = math.sqrt(query.shape[-1] * 3)
        scores = query @ (key / scale).transpose(-1, -2)
        scores = scores + self.disentangled_attention_bias(query, key, relative_pos, rel_embeddings, scale)
        shares = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0)
        return (shares @ value).transpose(1, 2).flatten(2)


class DebertaV2Output(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH, EPS)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + residual)


class DebertaV2Attention(nn.Module):
    def __init__(self, share_att_key: bool):
        super().__init__()
        self.self, self.output = DisentangledSelfAttention(share_att_key), DebertaV2Output(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, query_states: Tensor, *relative: Tensor) -> Tensor:
        return self.output(self.self(hidden, mask, query_states, *relative), query_states)


class DebertaV2Layer(nn.Module):
    def __init__(self, share_att_key: bool):
        super().__init__()
        self.attention = DebertaV2Attention(share_att_key)
        self.intermediate = nn.Sequential(OrderedDict(dense=nn.Linear(WIDTH, INNER), act=nn.GELU()))
        self.output = DebertaV2Output(INNER)

    def forward(self, hidden: Tensor, mask: Tensor, query_states: Tensor, *relative: Tensor) -> Tensor:
        attended = self.attention(hidden, mask, query_states, *relative)
        return self.output(self.intermediate(attended), attended)


class ConvLayer(nn.Module):
    """A convolution beside a layer: it reads the layer's input and adds to the layer's output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, hidden: Tensor, residual: Tensor, mask: Tensor) -> Tensor:
        padding = ~mask.bool().unsqueeze(-1)
        out = self.conv(hidden.transpose(1, 2)).transpose(1, 2).masked_fill(padding, 0)
        return self.LayerNorm(residual + F.gelu(out)).masked_fill(padding, 0)


class DebertaV2Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(DebertaV2Layer(i == SHARED) for i in range(LAYERS))
        self.rel_embeddings, self.LayerNorm = nn.Embedding(2 * BUCKETS, WIDTH), nn.LayerNorm(WIDTH, EPS)
        self.conv = ConvLayer()

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        places, states = range(hidden.shape[1]), [hidden]
        relative_pos = torch.tensor([[log_bucket(i - j) for j in places] for i in places], device=mask.device)
        pairs = (mask[:, None, None, :] * mask[:, None, :, None]).bool()
        shared = relative_pos, self.LayerNorm(self.rel_embeddings.weight)
        for i, layer in enumerate(self.layer):
            output = layer(hidden, pairs, hidden, *shared)
            hidden = self.conv(hidden, output, mask) if i == 0 else output
            states.append(hidden)
        return states, (pairs, *shared)


class DebertaV2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = DebertaV2Embeddings(), DebertaV2Encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[list[Tensor], tuple, Tensor]:
        embeddings, positions = self.embeddings(input_ids, attention_mask)
        return *self.encoder(embeddings, attention_mask), positions


class EnhancedMaskDecoder(nn.Module):
    """The last layer once more: absolute positions join its queries; its keys come from a layer earlier."""

    def __init__(self):
        super().__init__()
        dense, decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lm_head = nn.Sequential(
            OrderedDict(dense=dense, act=nn.GELU(), LayerNorm=nn.LayerNorm(WIDTH, EPS), decoder=decoder)
        )

    def forward(self, layer: nn.Module, states: list[Tensor], shared: tuple, positions: Tensor) -> Tensor:
        mask, *relative = shared
        return self.lm_head(layer(states[-2], mask, states[-1] + positions, *relative))


class DebertaV2ForMaskedLM(nn.Module):
    """Words [N, T] and their mask [N, T] -> scores [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.deberta, self.lm_predictions = DebertaV2Model(), EnhancedMaskDecoder()
        self.lm_predictions.lm_head.decoder.weight = self.deberta.embeddings.word_embeddings.weight
        initialise(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        outputs = self.deberta(input_ids, attention_mask)
        return self.lm_predictions(self.deberta.encoder.layer[-1], *outputs)


def counted_words() -> tuple[dict[str, Tensor], Tensor]:
    """Sequences that count up by one to three words at a time; some words are to be guessed."""
    place, lengths = torch.arange(LENGTH), torch.randint(7, LENGTH + 1, (6, 1))
    start, step = torch.randint(0, VOCAB, (6, 1)), torch.randint(1, 4, (6, 1))
    words, real = 2 + (start + step * place) % (VOCAB - 2), place < lengths
    asked = ((torch.rand(6, LENGTH) < 0.3) | (place == 3)) & real
    seen = words.masked_fill(asked, MASK).masked_fill(~real, PAD)
    return {"input_ids": seen, "attention_mask": real.long()}, words.masked_fill(~asked, IGNORED)


def surprise(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
