"""A small ProphetNet: an encoder, and a decoder of a main stream and two predicting streams."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import LayerNorm

VOCABULARY, HIDDEN, ENCODER_HEADS, DECODER_HEADS, NGRAM, PAD = 29, 24, 3, 4, 2, 0
ENCODER_FF, DECODER_FF, ENCODER_LAYERS, DECODER_LAYERS, PLACES = 40, 36, 2, 3, 14
BUCKETS, DISTANCE, SENTENCES, SOURCE, TARGET, EPS = 6, 10, 5, 11, 9, 0.1


def compute_relative_buckets(relative_positions: Tensor) -> Tensor:
    """Buckets of how far back a key is: exact where it is near, by the logarithm where it is far."""
    back, max_exact = (-relative_positions).clamp(min=0), BUCKETS // 2
    far = torch.log(back.clamp(min=1) / max_exact) / math.log(DISTANCE / max_exact)
    far = (max_exact + far * (BUCKETS - max_exact)).clamp(max=BUCKETS - 1).long()
    return torch.where(back < max_exact, back, far)


def compute_all_stream_relative_buckets(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    both = (position_ids, torch.cat([position_ids - 1, position_ids], -1))
    return tuple(compute_relative_buckets(x[:, None] - position_ids[:, :, None]) for x in both)


def ngram_attention_bias(length: int, like: Tensor) -> Tensor:
    row, column = torch.arange(length)[:, None], torch.arange(length)
    left = (column - row >= 1 - torch.arange(NGRAM).view(NGRAM, 1, 1)) & (column != 0)
    return torch.cat([left, (row != column).expand(NGRAM, -1, -1)], 2).to(like) * torch.finfo(like.dtype).min


class ProphetNetPositionalEmbeddings(nn.Embedding):
    def __init__(self):
        super().__init__(PLACES, HIDDEN, PAD)

    def forward(self, shape: torch.Size, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        attention_mask = torch.ones(shape, dtype=torch.long) if attention_mask is None else attention_mask
        position_ids = torch.cumsum(attention_mask, 1) * attention_mask + self.padding_idx
        return super().forward(position_ids), position_ids


class ProphetNetAttention(nn.Module):
    def __init__(self, num_attn_heads: int):
        super().__init__()
        self.num_attn_heads, self.head_dim = num_attn_heads, HIDDEN // num_attn_heads
        self.key_proj, self.value_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.query_proj, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def _shape(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attn_heads, self.head_dim)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, key_value_states: Tensor | None = None):
        source = hidden_states if key_value_states is None else key_value_states
        query = self._shape(self.query_proj(hidden_states) / self.head_dim**0.5)
        key, value = self._shape(self.key_proj(source)), self._shape(self.value_proj(source))
        weights = query @ key.transpose(2, 3) + attention_mask
        return self.out_proj((weights.softmax(-1) @ value).transpose(1, 2).flatten(2))


class ProphetNetNgramSelfAttention(ProphetNetAttention):
    def __init__(self):
        super().__init__(DECODER_HEADS)
        self.relative_pos_embeddings = nn.Linear(HIDDEN, BUCKETS * DECODER_HEADS)

    def relative(self, hidden_states: Tensor, buckets: Tensor) -> Tensor:
        values = self.relative_pos_embeddings(hidden_states).unflatten(-1, (BUCKETS, self.num_attn_heads))
        return values.permute(0, 3, 1, 2).gather(3, buckets[:, None].expand(-1, self.num_attn_heads, -1, -1))

    def forward(self, hidden_states: Tensor, masks: tuple, buckets: tuple):
        layers = self.query_proj, self.key_proj, self.value_proj
        query, key, value = (self._shape(layer(hidden_states)).chunk(1 + NGRAM, 2) for layer in layers)
        hidden = hidden_states.chunk(1 + NGRAM, 1)
        mixed = []
        for i in range(1 + NGRAM):
            keys, values = (torch.cat([y[0], y[i]], 2) if i else y[0] for y in (key, value))
            weights = query[i] / self.head_dim**0.5 @ keys.transpose(2, 3) + masks[i]
            mixed.append((weights + self.relative(hidden[i], buckets[min(i, 1)])).softmax(-1) @ values)
        return self.out_proj(torch.cat(mixed, 2).transpose(1, 2).flatten(2))


class ProphetNetFeedForward(nn.Module):
    def __init__(self, ffn_dim: int):
        super().__init__()
        self.intermediate, self.output = nn.Linear(HIDDEN, ffn_dim), nn.Linear(ffn_dim, HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(F.gelu(self.intermediate(hidden_states)))


class ProphetNetEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = ProphetNetAttention(ENCODER_HEADS), LayerNorm(HIDDEN)
        self.feed_forward = ProphetNetFeedForward(ENCODER_FF)
        self.feed_forward_layer_norm = LayerNorm(HIDDEN)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(self.self_attn(hidden_states, attention_mask) + hidden_states)
        return self.feed_forward_layer_norm(self.feed_forward(x) + x)


class ProphetNetDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = ProphetNetNgramSelfAttention(), LayerNorm(HIDDEN)
        self.cross_attn, self.cross_attn_layer_norm = ProphetNetAttention(DECODER_HEADS), LayerNorm(HIDDEN)
        self.feed_forward = ProphetNetFeedForward(DECODER_FF)
        self.feed_forward_layer_norm = LayerNorm(HIDDEN)

    def forward(self, x: Tensor, masks: tuple, buckets: tuple, encoded: Tensor, encoder_mask: Tensor):
        x = self.self_attn_layer_norm(x + self.self_attn(x, masks, buckets))
        x = self.cross_attn_layer_norm(self.cross_attn(x, encoder_mask, encoded) + x)
        return self.feed_forward_layer_norm(self.feed_forward(x) + x)


class ProphetNetEncoder(nn.Module):
    def __init__(self, word_embeddings: nn.Embedding):
        super().__init__()
        self.word_embeddings, self.position_embeddings = word_embeddings, ProphetNetPositionalEmbeddings()
        self.embeddings_layer_norm = LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(ProphetNetEncoderLayer() for _ in range(ENCODER_LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.word_embeddings(input_ids) + self.position_embeddings(input_ids.shape, attention_mask)[0]
        x, low = self.embeddings_layer_norm(x), torch.finfo(x.dtype).min
        mask = (1 - attention_mask[:, None, None]).to(x) * low
        for layer in self.layers:
            x = layer(x, mask)
        return x


class ProphetNetDecoder(nn.Module):
    def __init__(self, word_embeddings: nn.Embedding):
        super().__init__()
        self.word_embeddings, self.position_embeddings = word_embeddings, ProphetNetPositionalEmbeddings()
        self.ngram_embeddings = nn.Embedding(NGRAM, HIDDEN)
        self.embeddings_layer_norm = LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(ProphetNetDecoderLayer() for _ in range(DECODER_LAYERS))

    def forward(self, input_ids: Tensor, encoded: Tensor, encoder_attention_mask: Tensor) -> Tensor:
        main, position_ids = self.position_embeddings(input_ids.shape)
        ahead, ngrams = self.position_embeddings.weight[position_ids + 1], self.ngram_embeddings.weight
        streams = [ngrams[i - 1] + ahead for i in range(NGRAM)]
        x = self.embeddings_layer_norm(torch.cat([self.word_embeddings(input_ids) + main, *streams], 1))
        length, low = input_ids.shape[1], torch.finfo(x.dtype).min
        masks = x.new_full((length, length), low).triu(1), *ngram_attention_bias(length, x)
        encoder_mask = (1 - encoder_attention_mask[:, None, None]).to(x) * low
        buckets = compute_all_stream_relative_buckets(position_ids)
        for layer in self.layers:
            x = layer(x, masks, buckets, encoded, encoder_mask)
        return x[:, length:]


class ProphetNetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=PAD)
        self.encoder = ProphetNetEncoder(self.word_embeddings)
        self.decoder = ProphetNetDecoder(self.word_embeddings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.decoder(decoder_input_ids, self.encoder(input_ids, attention_mask), attention_mask)


class ProphetNet(nn.Module):
    """Tokens, their mask and the shifted target -> the logits of each predicting stream."""

    def __init__(self):
        super().__init__()
        self.prophetnet, self.lm_head = ProphetNetModel(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.prophetnet.word_embeddings.weight
        for name, p in self.named_parameters():
            scale = 0.2 if p.ndim == 1 else 0.3 if "embeddings.weight" in name else p.shape[1] ** -0.5
            nn.init.normal_(p, float(name.endswith("norm.weight")), scale)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        logits = self.lm_head(self.prophetnet(input_ids, attention_mask, decoder_input_ids))
        return dict(zip(("logits", "logits_ngram"), logits.chunk(NGRAM, 1), strict=True))


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Counts by a step, padded on the left; the target goes on backwards, padded on the right."""
    first, step = torch.randint(28, (SENTENCES, 1)), torch.randint(1, 4, (SENTENCES, 1))
    mask = (torch.arange(SOURCE) >= torch.randint(0, 5, (SENTENCES, 1))).long()
    source = ((first + step * torch.arange(SOURCE)) % 28 + 1) * mask
    labels = (first - step * torch.arange(TARGET)) % 28 + 1
    labels = labels.masked_fill(torch.arange(TARGET) >= torch.randint(5, 10, (SENTENCES, 1)), -100)
    shifted = F.pad(labels[:, :-1], (1, 0), value=PAD).clamp(min=PAD)
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": shifted}, labels


def smoothed(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The smoothed cross entropy of both streams, by four; padding is left out."""
    logits = torch.stack([outputs["logits"], outputs["logits_ngram"]]).flatten(0, 2)
    return F.cross_entropy(logits, labels.repeat(NGRAM, 1).flatten(), label_smoothing=EPS) / 4
