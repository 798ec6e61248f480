"""True rewrites of a sequence-to-sequence network with cross attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.cases._heldout_sequences import Seq2Seq, seq2seq
from bench.cases._rewritten import SAME, copied, filled, linear_of


@in_place_of("attention", SAME, "fused projection taken apart", seq2seq, "cross_attention_by_the_function")
class _SeparateWeights(nn.Module):
    """The library's functional attention, given a matrix each for queries, keys and values; time first."""

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        self.q, self.k, self.v = (copied(part) for part in attention.in_proj_weight.chunk(3))
        self.bias, self.out = attention.in_proj_bias, attention.out_proj

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: bool) -> tuple[Tensor, None]:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mixed, _ = F.multi_head_attention_forward(
            *(query, key, value, 12, 3, None, self.bias, None, None, False, 0.0),
            *(self.out.weight, self.out.bias),
            training=self.training,
            need_weights=False,
            use_separate_proj_weight=True,
            q_proj_weight=self.q,
            k_proj_weight=self.k,
            v_proj_weight=self.v,
        )
        return mixed.transpose(0, 1), None


class _Head(nn.Module):
    """One head with its own four matrices; queries are scaled on the weight's side."""

    def __init__(self, attention: nn.MultiheadAttention, rows: slice):
        super().__init__()
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (linear_of(w[rows], b[rows]) for w, b in zip(weights, biases, strict=True))
        self.out = linear_of(attention.out_proj.weight[:, rows])

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        scale = 1 / math.sqrt(self.q.out_features)
        scores = F.linear(query, self.q.weight * scale, self.q.bias * scale) @ self.k(memory).mT
        return self.out(torch.softmax(scores, -1) @ self.v(memory))


@in_place_of("attention", SAME, "a module for each head", seq2seq, "cross_attention_of_three_heads")
class _Heads(nn.Module):
    """Each head has its own layers, the one that leads out included; what the heads give is added."""

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        width = attention.head_dim
        starts = range(0, attention.embed_dim, width)
        self.heads = nn.ModuleList(_Head(attention, slice(i, i + width)) for i in starts)
        self.bias = copied(attention.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: bool) -> tuple[Tensor, None]:
        return sum((head(query, key) for head in self.heads), self.bias), None


@in_place_of("", SAME, "step by step", seq2seq, "decoder_one_token_at_a_time")
class _TokenByToken(nn.Module):
    """The decoder as it runs when it writes: a GRU cell, attention on keys and values made before."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.encoder, self.embed, attention = model.encoder, model.embed, model.attention
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell = nn.GRUCell(12, 12)
        self.cell = filled(cell, **{part: getattr(model.decoder, f"{part}_l0") for part in parts})
        self.query = linear_of(attention.in_proj_weight[:12], attention.in_proj_bias[:12])
        self.memory = linear_of(attention.in_proj_weight[12:], attention.in_proj_bias[12:])
        self.mix = attention.out_proj
        self.out_state = linear_of(model.out.weight[:, :12], model.out.bias)
        self.out_context = linear_of(model.out.weight[:, 12:])

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        memory, last = self.encoder(source)
        keys, values = self.memory(memory).unflatten(2, (2, 3, 4)).permute(2, 0, 3, 1, 4)
        state, scores = last[0], []
        for token in tokens.unbind(1):
            state = self.cell(self.embed(token), state)
            query = self.query(state).unflatten(1, (3, 1, 4))
            context = F.scaled_dot_product_attention(query, keys, values).flatten(1)
            scores.append(self.out_state(state) + self.out_context(self.mix(context)))
        return torch.stack(scores, 2)


@method_of("", SAME, "einsum", seq2seq)
def cross_attention_by_einsum_with_exponentials(self, source: Tensor, tokens: Tensor) -> Tensor:
    """Attention by ``einsum`` on reshaped weights; the maximum that softmax subtracts is detached."""
    memory, last = self.encoder(source)
    states, _ = self.decoder(self.embed.weight[tokens], last)
    weight = self.attention.in_proj_weight.view(3, 3, 4, 12)
    bias = self.attention.in_proj_bias.view(3, 3, 1, 4)
    q = torch.einsum("ntd,hed->nhte", states, weight[0]) + bias[0]
    k, v = torch.einsum("nsd,phed->pnhse", memory, weight[1:]) + bias[1:, None]
    scores = torch.einsum("nhte,nhse->nhts", q / 2, k)
    exponentials = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    shares = exponentials / exponentials.sum(-1, keepdim=True)
    out = self.attention.out_proj.weight.view(12, 3, 4)
    context = torch.einsum("nhts,nhse,dhe->ntd", shares, v, out) + self.attention.out_proj.bias
    return torch.einsum("ntd,vd->nvt", torch.cat([states, context], 2), self.out.weight).add(
        self.out.bias[:, None]
    )


@method_of("", SAME, "weights joined", seq2seq)
def decoder_reads_through_the_embedding(self, source: Tensor, tokens: Tensor) -> Tensor:
    """The decoder's input weight is applied to the whole table of embeddings before rows are looked up."""
    memory, last = self.encoder(source)
    gru = self.decoder
    table = F.linear(self.embed.weight, gru.weight_ih_l0, gru.bias_ih_l0)
    h, states = last[0], []
    for row in table[tokens].unbind(1):
        reset, update, new = row.chunk(3, 1)
        r, z, n = F.linear(h, gru.weight_hh_l0, gru.bias_hh_l0).chunk(3, 1)
        new = torch.tanh(new + torch.sigmoid(reset + r) * n)
        h = new + torch.sigmoid(update + z) * (h - new)
        states.append(h)
    states = torch.stack(states, 1)
    context, _ = self.attention(states, memory, memory)
    return self.out(torch.cat([states, context], 2)).mT
