"""Dropout whose random numbers are drawn in another order, in networks with several dropout layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.case import method_of
from bench.cases._heldout_fault_tasks import dropout_masked, dropout_siamese, droppath, vgg
from bench.cases._heldout_fault_vision import VGG

LAYERS = ("", "drop1", "drop2", "drop3")


@method_of("", "nondeterministic", "dropout in another order", vgg, module=LAYERS)
def masks_drawn_last_layer_first(self, x):
    """All masks are drawn before the first layer, the last layer's first."""
    if not self.training:
        return VGG.forward(self, x)
    n, one = len(x), torch.ones((), dtype=x.dtype, device=x.device)
    third, second = (F.dropout(one.expand(n, size), d.p) for size, d in ((20, self.drop3), (48, self.drop2)))
    first = F.dropout2d(one.expand(n, 8, 4, 4), self.drop1.p)
    x = first * self.pool1(self.act2(self.conv2(self.act1(self.conv1(x)))))
    x = second * self.pool2(self.act3(self.conv3(x))).flatten(1)
    return self.fc2(third * self.act4(self.fc1(x)))


ATTENTION = ("layers.0.attention", "layers.0.attention.drop")


@method_of("layers.0.attention", "nondeterministic", "dropout head by head", dropout_masked, module=ATTENTION)
def masks_drawn_head_by_head(self, x, memory, mask=None):
    """Attention in a loop over the heads, each of which draws its own mask; later layers draw others too."""
    q, k, v = (self.split(f(x)).unbind(1) for f in (self.query, self.key, self.value))
    mixed = []
    for a, b, c in zip(q, k, v, strict=True):
        scores = (a @ b.transpose(-2, -1) / a.shape[-1] ** 0.5).masked_fill(~mask[:, 0], float("-inf"))
        mixed.append(self.drop(scores.softmax(-1)) @ c)
    return self.out(torch.cat(mixed, -1))


@method_of("drop", "nondeterministic", "dropout before padding is cut", dropout_masked, module=("", "drop"))
def mask_drawn_for_the_longest_possible_input(self, x):
    """The first mask is drawn for ten positions, of which the input has eight."""
    return nn.Dropout.forward(self, F.pad(x, (0, 0, 0, 2)))[:, :-2]


CALLS = ("", "encoder", "encoder.drop")


@method_of("", "nondeterministic", "branches in another order", dropout_siamese, module=CALLS)
def right_signal_first(self, left, right):
    """The encoder is called on the right signal first, so that the two masks are exchanged."""
    right = self.encoder(right)
    return self.head((self.encoder(left) - right) ** 2)


@method_of("blocks.2.drop_path", "nondeterministic", "stochastic depth", droppath)
def paths_dropped_by_bernoulli(self, x):
    """Whole branches are dropped with the same odds, by other draws."""
    if not self.training:
        return x
    keep = torch.full((len(x), 1, 1, 1), 1 - self.p, dtype=torch.float64, device=x.device).bernoulli()
    return x * keep.to(x.dtype) / (1 - self.p)
