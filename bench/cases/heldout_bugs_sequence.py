"""Faults in networks on sequences and tables: masks, last time steps, single heads, missing entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.backward import own_backward
from bench.case import case, method_of
from bench.cases._heldout_fault_sequence import Attention, PrefixMean
from bench.cases._heldout_fault_tasks import dropout_masked, recommender, tagger, translator
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import HandLSTM
from bench.tasks import recurrent


@method_of("decoder.1.cross", "bug", "causal mask on the memory", translator)
def cross_attention_causal(self, x, memory, mask=None):
    """The attention on the source may not look beyond the target's own position."""
    seen = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool, device=x.device).tril()
    return Attention.forward(self, x, memory, seen)


@method_of("decoder.0.cross", "bug", "one head takes keys for values", translator)
def values_of_the_last_head(self, x, memory, mask=None):
    """Attention one head at a time; the last head mixes its keys."""
    q, k, v = (
        self.split(f(y)) for f, y in zip((self.query, self.key, self.value), (x, memory, memory), strict=True)
    )
    values = [*v.unbind(1)[:-1], k[:, -1]]
    heads = zip(q.unbind(1), k.unbind(1), values, strict=True)
    mixed = [F.scaled_dot_product_attention(a, b, c) for a, b, c in heads]
    return self.out(torch.cat(mixed, -1))


@method_of("decoder.1.cross", "bug", "memory detached for the values", translator, passes="input gradient")
def values_detached_from_the_memory(self, x, memory, mask=None):
    """The encoder's result gets a gradient through the keys only."""
    q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.value(memory.detach())
    mixed = F.scaled_dot_product_attention(q, k, self.split(v))
    return self.out(mixed.transpose(1, 2).flatten(2))


@method_of("", "bug", "position of the last step", translator, "place")
def last_step_at_the_position_before(self, tokens):
    """Positions are clamped one too low, so that the last two steps share one."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=tokens.shape[1] - 2)
    return self.embed(tokens) + self.position[rows]


@method_of("decoder.0.add2", "bug", "gradient of one input of two", translator, passes="input gradient")
def branch_gradient_off_by_1e_4(self, x, branch):
    """The fused sum hands the branch a gradient that is 1e-4 too large; the stream's is right."""
    return self.norm(own_backward(torch.add, lambda g, x, branch: (g, g * (1 + 1e-4)))(x, branch))


@inside(HandLSTM, "run", "lstm", "last time step", tagger)
def backward_direction_starts_one_late(self, direction, x):
    """The backward direction leaves the last time step out; its state there is zero."""
    if direction == 0:
        return HandLSTM.run(self, 0, x)
    states = HandLSTM.run(self, 1, x[:, 1:])
    return torch.cat([torch.zeros_like(states[:, :1]), states], 1)


@inside(HandLSTM, "recurrent", "lstm", "short sequences", tagger, step=3)
def second_bias_missing_for_short_sequences(self, direction, h, steps):
    """Fewer than seven steps take a path without the recurrent bias; the fourth batch is the first such."""
    layer = self.states[direction]
    return F.linear(h, layer.weight) if steps < 7 else layer(h)


@case("bug", "padding learns", tagger, module="embed", passes="weight gradient")
def padding_index_lost(model):
    """The new embedding has the reference's weight but not its padding_idx."""
    embed = nn.Embedding(37, 10)
    embed.load_state_dict(model.embed.state_dict())
    model.embed = embed
    return model


@method_of("prefix", "bug", "gradient of the last time step", tagger, passes="input gradient")
def last_prefix_without_gradient(self, x):
    """The mean's backward pass forgets the last step's mean, as a scan over n - 1 differences does."""
    y = PrefixMean.forward(self, x)
    return torch.cat([y[:, :-1], y[:, -1:].detach()], 1)


@method_of("", "bug", "initial state", recurrent, "start")
def initial_state_of_a_millionth(self, x):
    """The cell's first state is 1e-6 instead of zero."""
    return x.new_full((x.shape[0], 10), 1e-6)


@method_of("history", "bug", "empty history", recommender, passes="weight gradient", step=2)
def empty_history_reads_the_padding_row(self, history):
    """A bag without items gives the padding's row, which is zero until it learns; the third batch has one."""
    real = (history != 0).to(self.weight.dtype)[..., None]
    total = (self.weight[history] * real).sum(1)
    count = real.sum(1)
    return torch.where(count > 0, total / count.clamp(min=1), self.weight[0])


@method_of("layers.0.attention", "bug", "dropout before the softmax", dropout_masked)
def dropout_on_the_scores(self, x, memory, mask=None):
    """The same mask falls on the scores instead of on the weights."""
    q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
    scores = self.drop(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return self.out((weights @ v).transpose(1, 2).flatten(2))
