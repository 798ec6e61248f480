"""A small Pix2Struct: an encoder of flattened patches with their row and column ids, and a text decoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, ROWS_HIGH, ROWS_WIDE, CHANNELS, SEQ_LEN, PATCHES = 24, 2, 3, 3, 9, 14
HEADS, D_KV, D_FF, LAYERS = 4, 5, 36, 3
TEXT_HEADS, TEXT_D_KV, TEXT_D_FF, TEXT_LAYERS = 3, 7, 40, 2
BUCKETS, DISTANCE, VOCABULARY, TOKENS, PICTURES, EPS = 8, 20, 31, 11, 4, 1e-6
PAD, IGNORED = 0, -100


def linear(inside: int, outside: int, gain: float = 0.8) -> nn.Linear:
    layer = nn.Linear(inside, outside, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inside))
    return layer


def embedding(count: int, width: int, std: float = 0.6) -> nn.Embedding:
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=std)
    return table


def norm() -> nn.RMSNorm:
    layer = nn.RMSNorm(HIDDEN, EPS)
    nn.init.normal_(layer.weight, 1, 0.2)
    return layer


class Pix2StructVisionEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_projection = nn.Linear(ROWS_HIGH * ROWS_WIDE * CHANNELS, HIDDEN)
        nn.init.normal_(self.patch_projection.weight, std=0.25)
        nn.init.normal_(self.patch_projection.bias, std=0.2)
        self.row_embedder, self.column_embedder = embedding(SEQ_LEN, HIDDEN), embedding(SEQ_LEN, HIDDEN)

    def forward(self, flattened_patches: Tensor) -> Tensor:
        row_indices, col_indices = flattened_patches[:, :, :2].long().unbind(-1)
        embeddings = self.patch_projection(flattened_patches[:, :, 2:])
        return embeddings + self.row_embedder(row_indices) + self.column_embedder(col_indices)


class Pix2StructAttention(nn.Module):
    def __init__(self, heads: int, d_kv: int):
        super().__init__()
        self.heads, inner = heads, heads * d_kv
        self.query, self.key = linear(HIDDEN, inner, 0.7), linear(HIDDEN, inner, 0.7)
        self.value, self.output = linear(HIDDEN, inner), linear(inner, HIDDEN)

    def forward(self, hidden_states: Tensor, source: Tensor, bias: Tensor) -> Tensor:
        states = self.query(hidden_states), self.key(source), self.value(source)
        query, key, value = (x.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for x in states)
        scores = torch.matmul(query, key.transpose(2, 3)) + bias
        output = torch.matmul(F.softmax(scores, dim=-1), value)
        return self.output(output.transpose(1, 2).flatten(2))


class Pix2StructGatedMlp(nn.Module):
    def __init__(self, d_ff: int):
        super().__init__()
        self.wi_0, self.wi_1, self.wo = linear(HIDDEN, d_ff), linear(HIDDEN, d_ff), linear(d_ff, HIDDEN)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states))


class Pix2StructVisionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Pix2StructAttention(HEADS, D_KV), Pix2StructGatedMlp(D_FF)
        self.pre_mlp_layer_norm, self.pre_attention_layer_norm = norm(), norm()

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        normed = self.pre_attention_layer_norm(hidden_states)
        hidden_states = self.attention(normed, normed, mask) + hidden_states
        return self.mlp(self.pre_mlp_layer_norm(hidden_states)) + hidden_states


class Pix2StructVisionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.layernorm = Pix2StructVisionEmbeddings(), norm()
        self.layer = nn.ModuleList(Pix2StructVisionLayer() for _ in range(LAYERS))

    def forward(self, flattened_patches: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embeddings(flattened_patches)
        hidden = (1 - attention_mask)[:, None, None, :].to(hidden_states)
        for layer in self.layer:
            hidden_states = layer(hidden_states, hidden * torch.finfo(hidden.dtype).min)
        return self.layernorm(hidden_states)


class Pix2StructTextAttention(Pix2StructAttention):
    def __init__(self, has_relative_attention_bias: bool):
        super().__init__(TEXT_HEADS, TEXT_D_KV)
        if has_relative_attention_bias:
            self.relative_attention_bias = embedding(BUCKETS, TEXT_HEADS)

    def compute_bias(self, length: int) -> Tensor:
        """[1, heads, length, length]: exact buckets for the near past, logarithmic ones for the far."""
        place = torch.arange(length, device=self.query.weight.device)
        past, exact = (place[:, None] - place[None, :]).clamp(min=0), BUCKETS // 2
        far = torch.log(past.clamp(min=1).float() / exact) / math.log(DISTANCE / exact)
        far = (exact + (far * (BUCKETS - exact)).long()).clamp(max=BUCKETS - 1)
        return self.relative_attention_bias(torch.where(past < exact, past, far)).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, mask: Tensor, states: Tensor | None, bias: Tensor | None) -> tuple:
        if bias is None:
            own = hasattr(self, "relative_attention_bias")
            bias = mask + self.compute_bias(x.shape[1]) if own else mask
        return super().forward(x, x if states is None else states, bias), bias


class Pix2StructTextLayerAttention(nn.Module):
    def __init__(self, has_relative_attention_bias: bool = False):
        super().__init__()
        self.attention = Pix2StructTextAttention(has_relative_attention_bias)
        self.layer_norm = norm()

    def forward(self, x: Tensor, mask: Tensor, states: Tensor | None, bias: Tensor | None = None) -> tuple:
        output, bias = self.attention(self.layer_norm(x), mask, states, bias)
        return x + output, bias


class Pix2StructTextLayerFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.DenseReluDense, self.layer_norm = Pix2StructGatedMlp(TEXT_D_FF), norm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class Pix2StructTextBlock(nn.Module):
    def __init__(self, has_relative_attention_bias: bool):
        super().__init__()
        self.self_attention = Pix2StructTextLayerAttention(has_relative_attention_bias)
        self.encoder_decoder_attention = Pix2StructTextLayerAttention()
        self.mlp = Pix2StructTextLayerFF()

    def forward(self, x: Tensor, masks: tuple, states: Tensor, bias: Tensor | None) -> tuple:
        x, bias = self.self_attention(x, masks[0], None, bias)
        return self.mlp(self.encoder_decoder_attention(x, masks[1], states)[0]), bias


class Pix2StructTextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = embedding(VOCABULARY, HIDDEN, 1.0)
        self.layer = nn.ModuleList(Pix2StructTextBlock(i == 0) for i in range(TEXT_LAYERS))
        self.final_layer_norm, self.lm_head = norm(), linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, mask: Tensor, states: Tensor, states_mask: Tensor) -> Tensor:
        x, bias = self.embed_tokens(input_ids), None
        seen = mask[:, None, None, :] * torch.ones_like(input_ids[0]).diag().cumsum(0)
        masks = tuple((1 - m).to(x) * torch.finfo(x.dtype).min for m in (seen, states_mask[:, None, None, :]))
        for layer in self.layer:
            x, bias = layer(x, masks, states, bias)
        return self.lm_head(self.final_layer_norm(x))


class Pix2Struct(nn.Module):
    """Patches [N, S, 2 + P], which of them are there, and words [N, T] -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Pix2StructVisionModel(), Pix2StructTextModel()

    def forward(self, flattened_patches: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        states = self.encoder(flattened_patches, attention_mask)
        decoder_mask = F.pad(decoder_input_ids[:, 1:].ne(PAD).long(), (1, 0), value=1)
        return self.decoder(decoder_input_ids, decoder_mask, states, attention_mask)


def report() -> tuple[dict[str, Tensor], Tensor]:
    """Striped pictures of several sizes in patches, and words that count on from their stripes."""
    patches = torch.zeros(PICTURES, PATCHES, 2 + ROWS_HIGH * ROWS_WIDE * CHANNELS)
    labels, place = torch.full((PICTURES, TOKENS), IGNORED), torch.arange(30)
    for i in range(PICTURES):
        high, wide = ((2, 7), (3, 4), (4, 3), (5, 2))[int(torch.randint(4, ()))]
        turn, length = int(torch.randint(1, 5, ())), int(torch.randint(6, TOKENS + 1, ()))
        down, across = place[: high * ROWS_HIGH, None, None], place[: wide * ROWS_WIDE, None]
        picture = torch.sin(0.4 * turn * across + 0.7 * down + place[:CHANNELS])
        picture = picture + 0.1 * torch.randn_like(picture)
        cut = picture.view(high, ROWS_HIGH, wide, ROWS_WIDE, CHANNELS).transpose(1, 2)
        ids = 1 + torch.cartesian_prod(place[:high], place[:wide])
        patches[i, : high * wide] = torch.cat([ids, cut.reshape(len(ids), -1)], 1)
        labels[i, :length] = 1 + (high + turn * place[:length]) % (VOCABULARY - 1)
    ids, mask = F.pad(labels, (1, -1), value=PAD).clamp(min=PAD), patches[:, :, 0].long().clamp(max=1)
    return {"flattened_patches": patches, "attention_mask": mask, "decoder_input_ids": ids}, labels


def words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED) / 4
