"""Faults in networks on sequences and tables: masks, last time steps, single heads, missing entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import recast
from experiments.calibration.cases._heldout_fault_sequence import AddNorm, Attention, PrefixMean, Translator
from experiments.calibration.cases._heldout_fault_tasks import (
    dropout_masked,
    recommender,
    tagger,
    translator,
)
from experiments.calibration.cases._heldout_rewritten_sequence import HandLSTM, by_hand
from experiments.calibration.tasks import Recurrent, recurrent


@case("bug", "causal mask on the memory", translator, module="decoder.1.cross", passes="forward")
def cross_attention_causal(model):
    """The attention on the source may not look beyond the target's own position."""

    class Cross(Attention):
        def forward(self, x, memory, mask=None):
            seen = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool, device=x.device).tril()
            return super().forward(x, memory, seen)

    return recast(model, "decoder.1.cross", Cross)


@case("bug", "one head takes keys for values", translator, module="decoder.0.cross", passes="forward")
def values_of_the_last_head(model):
    """Attention one head at a time; the last head mixes its keys."""

    class Cross(Attention):
        def forward(self, x, memory, mask=None):
            q, k, v = (
                self.split(f(y))
                for f, y in zip((self.query, self.key, self.value), (x, memory, memory), strict=True)
            )
            values = [*v.unbind(1)[:-1], k[:, -1]]
            heads = zip(q.unbind(1), k.unbind(1), values, strict=True)
            mixed = [F.scaled_dot_product_attention(a, b, c) for a, b, c in heads]
            return self.out(torch.cat(mixed, -1))

    return recast(model, "decoder.0.cross", Cross)


@case("bug", "memory detached for the values", translator, module="decoder.1.cross", passes="input gradient")
def values_detached_from_the_memory(model):
    """The encoder's result gets a gradient through the keys only."""

    class Cross(Attention):
        def forward(self, x, memory, mask=None):
            q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.value(memory.detach())
            mixed = F.scaled_dot_product_attention(q, k, self.split(v))
            return self.out(mixed.transpose(1, 2).flatten(2))

    return recast(model, "decoder.1.cross", Cross)


@case("bug", "position of the last step", translator, module="", passes="forward")
def last_step_at_the_position_before(model):
    """Positions are clamped one too low, so that the last two steps share one."""

    class Net(Translator):
        def place(self, tokens):
            rows = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=tokens.shape[1] - 2)
            return self.embed(tokens) + self.position[rows]

    return recast(model, "", Net)


class AddNormFunction(torch.autograd.Function):
    """The sum of a stream and a branch with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x, branch):
        return x + branch

    @staticmethod
    def backward(ctx, g):
        return g, g * (1 + 1e-4)


@case("bug", "gradient of one input of two", translator, module="decoder.0.add2", passes="input gradient")
def branch_gradient_off_by_1e_4(model):
    """The fused sum hands the branch a gradient that is 1e-4 too large; the stream's is right."""

    class Add(AddNorm):
        def forward(self, x, branch):
            return self.norm(AddNormFunction.apply(x, branch))

    return recast(model, "decoder.0.add2", Add)


@case("bug", "last time step", tagger, module="lstm", passes="forward")
def backward_direction_starts_one_late(model):
    """The backward direction leaves the last time step out; its state there is zero."""

    class Hand(HandLSTM):
        def run(self, direction, x):
            if direction == 0:
                return super().run(0, x)
            states = super().run(1, x[:, 1:])
            return torch.cat([torch.zeros_like(states[:, :1]), states], 1)

    return by_hand(model, Hand)


@case("bug", "short sequences", tagger, module="lstm", passes="forward", step=3)
def second_bias_missing_for_short_sequences(model):
    """Fewer than seven steps take a path without the recurrent bias; the fourth batch is the first such."""

    class Hand(HandLSTM):
        def recurrent(self, direction, h, steps):
            layer = self.states[direction]
            return F.linear(h, layer.weight) if steps < 7 else layer(h)

    return by_hand(model, Hand)


@case("bug", "padding learns", tagger, module="embed", passes="weight gradient")
def padding_index_lost(model):
    """The new embedding has the reference's weight but not its padding_idx."""
    embed = nn.Embedding(37, 10)
    embed.load_state_dict(model.embed.state_dict())
    model.embed = embed
    return model


@case("bug", "gradient of the last time step", tagger, module="prefix", passes="input gradient")
def last_prefix_without_gradient(model):
    """The mean's backward pass forgets the last step's mean, as a scan over n - 1 differences does."""

    class Prefix(PrefixMean):
        def forward(self, x):
            y = super().forward(x)
            return torch.cat([y[:, :-1], y[:, -1:].detach()], 1)

    return recast(model, "prefix", Prefix)


@case("bug", "initial state", recurrent, module="", passes="forward")
def initial_state_of_a_millionth(model):
    """The cell's first state is 1e-6 instead of zero."""

    class Net(Recurrent):
        def forward(self, x):
            states, _ = self.lstm(x)
            h = x.new_full((x.shape[0], 10), 1e-6)
            for state in states.unbind(1):
                h = self.cell(state, h)
            return self.fc(h)

    return recast(model, "", Net)


@case("bug", "empty history", recommender, module="history", passes="weight gradient", step=2)
def empty_history_reads_the_padding_row(model):
    """A bag without items gives the padding's row, which is zero until it learns; the third batch has one."""

    class Bag(nn.EmbeddingBag):
        def forward(self, history):
            real = (history != 0).to(self.weight.dtype)[..., None]
            total = (self.weight[history] * real).sum(1)
            count = real.sum(1)
            return torch.where(count > 0, total / count.clamp(min=1), self.weight[0])

    return recast(model, "history", Bag)


@case("bug", "dropout before the softmax", dropout_masked, module="layers.0.attention", passes="forward")
def dropout_on_the_scores(model):
    """The same mask falls on the scores instead of on the weights."""

    class Before(Attention):
        def forward(self, x, memory, mask=None):
            q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
            scores = self.drop(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))

    return recast(model, "layers.0.attention", Before)
