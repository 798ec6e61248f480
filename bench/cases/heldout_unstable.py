"""Right rewrites of fresh networks under settings at which the training diverges, the reference's too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_fault_tasks import masked, mixture, mobile, preact, recommender, siamese, translator
from bench.cases._heldout_rewritten_sequence import PackedEncoder, stacked
from bench.cases._heldout_rewritten_vision import PixelMobileNet, SplitPreActNet
from bench.cases._rewritten import linear_of
from bench.optimizers import adam, sgd
from bench.surgery import recast


@case("unstable", "learning rate too high", preact, optimizer=sgd(60.0), steps=30)
def exploding_preact(model):
    """The whole network split and permuted; BatchNorm lets SGD at 60 go on, at losses of many millions."""
    return SplitPreActNet(model)


@case("unstable", "learning rate too high", mobile, optimizer=sgd(5.0), steps=30)
def exploding_mobile(model):
    """The whole network on channels-last tensors; SGD at 5 overflows near step 20 in float32."""
    return PixelMobileNet(model)


@case("unstable", "edge of stability", masked, optimizer=sgd(1.0), steps=30)
def masked_past_the_edge(model):
    """The whole network packed; SGD at 1 looks healthy for six steps, then overflows."""
    return PackedEncoder(model)


@method_of(
    "encoder.conv", "unstable", "learns, then falls", siamese, "_conv_forward", optimizer=sgd(0.5), steps=40
)
def siamese_that_learns_before_it_falls(self, x, weight, bias):
    """A conv as a product over windows; the loss reaches 0.01 before it overflows after step 30."""
    windows = F.pad(x, (1, 1)).unfold(2, 3, 1)
    return torch.einsum("nctk,ock->not", windows, weight) + bias[:, None]


@case("unstable", "Adam's rate too high", mixture, optimizer=adam(3.0), steps=30)
def adam_mixture(model):
    """Experts stacked; Adam at 3 throws the loss up by four decades, and rows change their experts."""
    return stacked(model)


QUIET = {"optimizer": sgd(0.3), "steps": 25}


@in_place_of("fc1", "unstable", "learning rate too high", recommender, "recommender_past_the_edge", **QUIET)
class ByTable(nn.Module):
    """The first layer split by tables; the product of two learnt rows overflows after ten quiet steps."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        user, item, history = layer.weight.chunk(3, 1)
        self.user, self.item = linear_of(user, layer.bias), linear_of(item)
        self.history = linear_of(history)

    def forward(self, x):
        user, item, history = x.chunk(3, 1)
        return self.history(history) + self.item(item) + self.user(user)


@case("unstable", "learning rate too high", translator, optimizer=sgd(5.0), steps=20)
def exploding_translator(model):
    """The memory's keys and values from one product; SGD at 5 overflows near step 12."""

    class Packed(type(model.decoder[0].cross)):
        def forward(self, x, memory, mask=None):
            weight = torch.cat([self.key.weight, self.value.weight])
            both = F.linear(memory, weight, torch.cat([self.key.bias, self.value.bias]))
            k, v = (self.split(part) for part in both.chunk(2, -1))
            mixed = F.scaled_dot_product_attention(self.split(self.query(x)), k, v)
            return self.out(mixed.transpose(1, 2).flatten(2))

    return recast(model, "decoder.0.cross", Packed)
