"""Right, but suspicious: other results besides, other containers, counters, leftovers, missing gradients."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from bench.backward import scaled_gradient
from bench.case import case, in_place_of, method_of
from bench.cases._heldout_images import UNet, transfer, unet
from bench.cases._heldout_sequences import MaskedEncoder, masked_encoder, tagger
from bench.cases._heldout_tables import Codebook, Regression, codebook, regression
from bench.cases._heldout_tasks import ConvNext, convnext, preact
from bench.surgery import recast

EQUAL = ("bit_identical", "round_off")
Normal = namedtuple("Normal", ["mean", "log_variance"])


@method_of("", EQUAL, "no graph for what is frozen", transfer)
def backbone_without_a_graph(self, x: Tensor) -> Tensor:
    """The frozen backbone runs under ``no_grad``: no weight before the head is trained."""
    with torch.no_grad():
        features = self.backbone(x)
    return self.fc2(torch.tanh(self.fc1(features.mean((2, 3)))))


@method_of("", EQUAL, "more results", codebook)
def chosen_codes_returned_as_well(self, x: Tensor) -> dict[str, Tensor]:
    """The dict of results holds the indices of the codes and how often each was used, besides."""
    results = Codebook.forward(self, x)
    with torch.no_grad():
        chosen = self.nearest(self.encode(x))
    return results | {"codes": chosen, "usage": chosen.bincount(minlength=8) / len(x)}


@method_of("", EQUAL, "another container", codebook)
def results_in_an_ordered_dict(self, x: Tensor) -> OrderedDict[str, Tensor]:
    """The same results under the same keys, the last first."""
    return OrderedDict(reversed(Codebook.forward(self, x).items()))


@in_place_of("", EQUAL, "another container", regression, "results_in_a_named_tuple")
class ResultsInANamedTuple(nn.Module):
    """Mean and variance have names; the layers are declared in the opposite order."""

    def __init__(self, model: Regression):
        super().__init__()
        for name, child in reversed(list(model.named_children())):
            self.add_module(name, child)
        for name, buffer in reversed(list(model.named_buffers())):
            self.register_buffer(name, buffer.clone())

    def forward(self, x: Tensor) -> Normal:
        return Normal(*Regression.forward(self, x))


@in_place_of("", EQUAL, "wrapped", masked_encoder, "network_inside_a_wrapper")
class NetworkInsideAWrapper(nn.Module):
    """All names get a prefix, arguments are passed by name; tokens come as 32-bit, the mask as a number."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        named["tokens"], named["segments"] = named["tokens"].int(), named["segments"].int()
        return self.module(*inputs, **(named | {"mask": named["mask"].float().bool()}))


@case(EQUAL, "another buffer", on=unet)
def calls_counted_in_buffers(model: nn.Module) -> nn.Module:
    """Two buffers that no result depends on: how many images were seen, and their mean."""

    class Counting(UNet):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += len(x)
                self.average.lerp_(x.detach().mean(), 0.01)
            return super().forward(x)

    model.register_buffer("seen", torch.zeros((), dtype=torch.long))
    model.register_buffer("average", torch.zeros(()))
    return recast(model, "", Counting)


@case(EQUAL, "weights left over", on=convnext, optimizer=partial(AdamW, lr=2e-3, weight_decay=0.1))
def old_head_kept_for_old_checkpoints(model: nn.Module) -> nn.Module:
    """The head of another data set stays, never called; without a gradient the optimizer leaves it alone."""

    class TwoHeads(ConvNext):
        def forward(self, x: Tensor) -> Tensor:
            features = self.norm(self.blocks(self.stem(x)).mean((2, 3)))
            return (self.head if self.current == "new" else self.old_head)(features)

    model.old_head, model.current = nn.Linear(12, 100), "new"
    return recast(model, "", TwoHeads)


@method_of("fc", EQUAL, "gradient scaled and scaled back", tagger)
def gradients_scaled_inside(self, x: Tensor) -> Tensor:
    """Gradients run through the last layer 1024 times too large; its weights and its input see them right."""
    x, weight, bias = (scaled_gradient(t, 1 / 1024) for t in (x, self.weight, self.bias))
    return scaled_gradient(F.linear(x, weight, bias), 1024.0)


@method_of("embed", ("round_off", "bit_identical"), "row that is zero anyway", tagger)
def padding_cut_to_zero(self, tokens: Tensor) -> Tensor:
    """The padding's row, zero and never trained, is multiplied by zero instead of being an exception."""
    return F.embedding(tokens, self.weight) * tokens.ne(0).unsqueeze(-1)


@method_of("", EQUAL, "checkpointing", preact)
def block_checkpointed_the_old_way(self, x: Tensor) -> Tensor:
    """A block is run without a graph and again in the backward pass, by the reentrant checkpoint."""
    x = checkpoint(self.block2, self.block1(self.stem(x)), use_reentrant=True)
    return self.fc(F.relu(self.norm(x)).mean((2, 3)))


@method_of("", EQUAL, "result in another memory order", masked_encoder)
def scores_with_other_strides(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """The scores come as a view into a larger tensor, and the hidden states as copies of copies."""
    scores = MaskedEncoder.forward(self, tokens.clone(), mask.contiguous().clone(), segments)
    room = scores.new_zeros(scores.shape[1], 2 * scores.shape[0])
    room[:, ::2] = scores.T
    return room[:, ::2].T
