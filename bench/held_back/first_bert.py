"""A BERT classifier with padded sentences: packed tokens, torch's attention time first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import both, joined, leaf, pile
from bench.tasks import _task

W = 24


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(31, W), nn.Embedding(14, W), nn.Embedding(2, W)
        self.norm = nn.LayerNorm(W, eps=1e-12)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.words(tokens) + self.positions(places) + self.types(types))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(W, W) for _ in range(4))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None])
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(W), nn.LayerNorm(W)
        self.up, self.down = nn.Linear(W, 32), nn.Linear(32, W)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, kept))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.layers = Embeddings(), nn.ModuleList([Layer(), Layer()])
        self.pooler, self.classifier = nn.Linear(W, W), nn.Linear(W, 5)

    def forward(self, tokens: Tensor, types: Tensor, kept: Tensor) -> Tensor:
        x = self.embeddings(tokens, types)
        for layer in self.layers:
            x = layer(x, kept)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def _batch() -> tuple[dict, Tensor]:
    kept = torch.arange(10) < torch.randint(4, 11, (8, 1))
    types = (torch.arange(10) >= torch.randint(2, 6, (8, 1))).long()
    return {"tokens": torch.randint(31, (8, 10)) * kept, "types": types, "kept": kept}, torch.randint(5, (8,))


bert = _task("first_bert", Bert, _batch)


class Packed(nn.Module):
    """Only the real tokens of all sentences in one row, each seeing those of its own sentence."""

    def __init__(self, model: Bert, wrong: bool = False):
        super().__init__()
        e, self.wrong = model.embeddings, wrong
        self.tables = joined([e.words.weight, e.positions.weight, e.types.weight])
        self.norm, self.ends = e.norm, nn.Sequential(model.pooler, nn.Tanh(), model.classifier)
        three = [(a.query, a.key, a.value) for a in (b.attention for b in model.layers)]
        self.qkv = pile(torch.stack([f.weight.view(4, 6, W) for f in fs]) for fs in three)
        self.qkv_bias = pile(torch.stack([f.bias.view(4, 6) for f in fs]) for fs in three)
        self.rest = nn.ModuleList(
            nn.ModuleList([b.attention.output, b.norm1, nn.Sequential(b.up, nn.GELU(), b.down), b.norm2])
            for b in model.layers
        )

    def forward(self, tokens: Tensor, types: Tensor, kept: Tensor) -> Tensor:
        sentence, place = kept.nonzero().unbind(1)
        words, places, kinds = self.tables.split([31, 14, 2])
        x = self.norm(words[tokens[kept]] + places[place] + kinds[types[kept]])
        own = sentence[:, None] == sentence
        scale = W if self.wrong else 6
        for weight, bias, (out, norm1, feed, norm2) in zip(self.qkv, self.qkv_bias, self.rest, strict=True):
            q, k, v = torch.einsum("pd,chkd->chpk", x, weight) + bias[:, :, None]
            weights = (q @ k.mT * scale**-0.5).masked_fill(~own, -torch.inf).softmax(2)
            x = norm1(x + out((weights @ v).permute(1, 0, 2).flatten(1)))
            x = norm2(x + feed(x))
        return self.ends(x[place == 0])


class TimeFirst(nn.Module):
    """nn.MultiheadAttention on [T, N, D]; two token types as a line between their vectors."""

    def __init__(self, model: Bert, wrong: bool = False):
        super().__init__()
        self.wrong, e = wrong, model.embeddings
        self.words, self.places, self.kinds = (
            leaf(e.words.weight),
            leaf(e.positions.weight),
            leaf(e.types.weight),
        )
        self.mixers = nn.ModuleList(nn.MultiheadAttention(W, 4) for _ in range(2))
        self.norms, self.feeds = nn.ModuleList([e.norm]), nn.ModuleList()
        for mixer, b in zip(self.mixers, model.layers, strict=True):
            mixer.in_proj_weight = joined(getattr(b.attention, n).weight for n in ("query", "key", "value"))
            mixer.in_proj_bias = joined(getattr(b.attention, n).bias for n in ("query", "key", "value"))
            mixer.out_proj.load_state_dict(b.attention.output.state_dict())
            self.norms.extend([b.norm1, b.norm2])
            self.feeds.extend([b.up, b.down])
        self.feeds.extend([model.pooler, model.classifier])

    def forward(self, tokens: Tensor, types: Tensor, kept: Tensor) -> Tensor:
        kind = torch.lerp(*self.kinds, types.T[..., None].to(self.words.dtype))
        x = self.norms[0](self.words[tokens.T] + self.places[: tokens.shape[1], None] + kind)
        for i, mixer in enumerate(self.mixers):
            hidden = None if self.wrong and i else ~kept
            x = self.norms[2 * i + 1](x + mixer(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
            x = self.norms[2 * i + 2](x + self.feeds[2 * i + 1](F.gelu(self.feeds[2 * i](x))))
        return self.feeds[5](self.feeds[4](x[0]).tanh())


class OtherEmbeddings(Embeddings):
    """One sum of counts times the joined tables; RoBERTa's positions start later."""

    wrong = False

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        places = (torch.arange(tokens.shape[1], device=tokens.device) + 2 * self.wrong).expand_as(tokens)
        ids = torch.stack([tokens, places + 31, types + 45], 2)
        table = torch.cat([self.words.weight, self.positions.weight, self.types.weight])
        return self.norm(F.one_hot(ids, 47).sum(2).to(table.dtype) @ table)


both(bert, Packed, "only_real_tokens_in_one_row", "scaled_by_the_whole_width", "layers.0.attention")
both(bert, TimeFirst, "torch_attention_time_first", "second_layer_sees_the_padding", "layers.1.attention")
PLACES = ("embeddings", "embeddings.positions")
both(bert, OtherEmbeddings, "three_tables_as_one_count", "positions_start_at_two", PLACES)
