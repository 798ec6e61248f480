"""A Marian-like encoder and decoder of torch's layers: all attentions in one tensor, norms stacked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import later, leaf, pile
from bench.held_back._third_ports import faults
from bench.tasks import _task

W, V = 24, 21
LAYER = {"nhead": 3, "dim_feedforward": 32, "dropout": 0.0, "activation": F.silu, "batch_first": True}


class Positions(nn.Module):
    """All sines, then all cosines."""

    def forward(self, x: Tensor) -> Tensor:
        rates = 100.0 ** -(torch.arange(W // 2, device=x.device, dtype=x.dtype) / (W // 2))
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        return x + torch.cat([angles.sin(), angles.cos()], 1)


class Marian(nn.Module):
    """Source and target tokens -> logits; one table for both sides and the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions, self.head = nn.Embedding(V, W), Positions(), nn.Linear(W, V)
        nn.init.normal_(self.embed.weight, std=W**-0.5)
        self.head.weight = self.embed.weight
        self.encoder = nn.TransformerEncoderLayer(W, **LAYER)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(W, **LAYER) for _ in range(2))
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)

    def enter(self, tokens: Tensor) -> Tensor:
        return self.positions(self.embed(tokens) * W**0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.encoder(self.enter(source)), self.enter(target)
        for layer in self.decoder:
            x = layer(x, memory, later(x.shape[1], x.device))
        return self.head(x)


def _batch() -> tuple[dict, Tensor]:
    words = torch.randint(V, (6, 8))
    return {"source": torch.randint(V, (6, 9)), "target": words[:, :-1]}, words[:, 1:]


def _loss(out: Tensor | tuple, target: Tensor) -> Tensor:
    return F.cross_entropy((out[0] if isinstance(out, tuple) else out).flatten(0, 1), target.flatten())


class Tensors(nn.Module):
    """No modules at all; the logits and the memory come out."""

    def __init__(self, model: Marian, wrong: str = ""):
        super().__init__()
        self.wrong, layers = wrong, [model.encoder, *model.decoder]
        mixers = [m for each in layers for m in each.children() if isinstance(m, nn.MultiheadAttention)]
        norms = [m for each in layers for m in each.children() if isinstance(m, nn.LayerNorm)]
        self.table, self.last = leaf(model.embed.weight.T), leaf(model.head.bias)
        self.enter = pile(m.in_proj_weight.view(3, 3, 8, W) for m in mixers)
        self.enter_bias = pile(m.in_proj_bias.view(3, 3, 1, 8) for m in mixers)
        self.leave = pile(m.out_proj.weight.view(W, 3, 8) for m in mixers)
        self.leave_bias = pile(m.out_proj.bias for m in mixers)
        self.norms = pile(torch.stack([m.weight, m.bias]) for m in norms)
        self.up = pile(torch.cat([e.linear1.weight.T, e.linear1.bias[None]]) for e in layers)
        self.down = pile(torch.cat([e.linear2.weight.T, e.linear2.bias[None]]) for e in layers)

    def words(self, tokens: Tensor, factor: float) -> Tensor:
        steps = torch.arange(W // 2, device=tokens.device, dtype=self.table.dtype)
        turn = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), 100.0 ** (-2 * steps / W))
        waves = torch.stack([turn.sin(), turn.cos()], 1)
        waves = waves.mT if self.wrong == "sines_and_cosines_interleaved" else waves
        return F.embedding(tokens, self.table.T) * factor + waves.flatten(1)

    def norm(self, x: Tensor, i: int) -> Tensor:
        return F.layer_norm(x, (W,), *self.norms[i])

    def attend(self, i: int, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        w, (bq, bk, bv), shift = self.enter[i], self.enter_bias[i], self.leave_bias[i]
        if self.wrong == "value_bias_dropped_in_cross_attention" and i == 2:
            bv = torch.zeros_like(bv)
        q = torch.einsum("ntd,hed->nhte", x, w[0]) + bq
        k, v = torch.einsum("nsd,ched->cnhse", memory, w[1:])
        if self.wrong == "keys_do_not_teach_the_encoder" and i == 4:
            k = torch.einsum("nsd,hed->nhse", memory.detach(), w[1])
        scores = torch.einsum("nhte,nhse->nhts", q / 8**0.5, k + bk)
        if causal:
            scores = scores.masked_fill(later(x.shape[1], x.device), -torch.inf)
        return torch.einsum("nhts,nhse,dhe->ntd", scores.softmax(3), v + bv, self.leave[i]) + shift

    def feed(self, i: int, x: Tensor) -> Tensor:
        act = F.relu if self.wrong == "encoder_keeps_the_usual_activation" and i == 0 else F.silu
        y = act(torch.addmm(self.up[i][-1], x.flatten(0, 1), self.up[i][:-1]))
        return (y @ self.down[i][:-1] + self.down[i][-1]).view_as(x)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        factor = 1.0 if self.wrong == "decoder_words_unscaled" else W**0.5
        memory, x = self.words(source, W**0.5), self.words(target, factor)
        memory = self.norm(memory + self.attend(0, memory, memory), 0)
        memory = self.norm(memory + self.feed(0, memory), 1)
        for i in range(2):
            y = self.norm(x + self.attend(2 * i + 1, x, x, causal=True), 3 * i + 2)
            kept = x if self.wrong == "cross_attention_added_to_the_layer_input" and i else y
            x = self.norm(kept + self.attend(2 * i + 2, y, memory), 3 * i + 3)
            x = self.norm(x + self.feed(i + 1, x), 3 * i + 4)
        head = self.table.detach() if self.wrong == "head_does_not_teach_the_words" else self.table
        return x @ head + self.last, memory


marian = _task("third_marian", Marian, _batch, _loss)
faults(
    marian,
    Tensors,
    sines_and_cosines_interleaved=("positions",),
    decoder_words_unscaled=("",),
    value_bias_dropped_in_cross_attention=("decoder.0.multihead_attn",),
    cross_attention_added_to_the_layer_input=("decoder.1",),
    encoder_keeps_the_usual_activation=("encoder",),
    keys_do_not_teach_the_encoder=("decoder.1.multihead_attn", "input gradient"),
    head_does_not_teach_the_words=(("head", "embed"), "weight gradient"),
)
