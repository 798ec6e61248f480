"""Faults of what is kept: between two calls of one module, between batches, in buffers, in evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, method_of
from bench.cases._heldout_fault_tasks import frozen, mixture, preact, siamese, tagger, vgg
from bench.cases._heldout_fault_vision import Frozen
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import HandLSTM, StackedMixture, by_hand
from bench.surgery import recast


class SavedOnTheModule(torch.autograd.Function):
    """tanh whose result is kept in a dictionary of the module's, not in the context."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept, kept["y"] = kept, x.tanh()
        return kept["y"].clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.kept["y"] ** 2), None


@case("bug", "second call overwrites the first", siamese, module="encoder.act", passes="input gradient")
def saved_tensor_overwritten_by_the_second_call(model):
    """What the backward pass needs is kept on the module; a second call before it overwrites the first's."""

    class Act(nn.Tanh):
        def forward(self, x):
            return SavedOnTheModule.apply(x, self.kept)

    return recast(model, "encoder.act", Act, kept={})


JOINED = ("", "encoder", "encoder.norm")


@method_of("", "bug", "two calls joined in one", siamese, module=JOINED)
def both_signals_in_one_batch(self, left, right):
    """Both signals go through the encoder as one batch, so that its BatchNorm sees them together."""
    left, right = self.encoder(torch.cat([left, right])).chunk(2)
    return self.head((left - right) ** 2)


@case("bug", "running statistics of one call of two", siamese, module="encoder.norm", passes="buffer")
def running_statistics_of_the_first_call_only(model):
    """Every second call leaves the running statistics alone."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            if self.training:
                self.odd = not self.odd
                if not self.odd:
                    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
            return super().forward(x)

    return recast(model, "encoder.norm", Norm, odd=False)


@method_of("stages.1.norm1", "bug", "running statistics of one channel", preact, passes="buffer")
def running_mean_of_one_channel_stays(self, x):
    """The kernel that updates the running mean leaves out the last channel."""
    before = self.running_mean[-1].clone()
    y = nn.BatchNorm2d.forward(self, x)
    self.running_mean.data[-1] = before
    return y


@method_of("backbone.norm1", "bug", "frozen statistics move", frozen, passes="buffer")
def frozen_statistics_move(self, x):
    """The norm of a frozen backbone uses its running statistics, then updates them."""
    y = nn.BatchNorm2d.forward(self, x)
    if torch.is_grad_enabled():
        with torch.no_grad():
            self.running_mean.lerp_(x.mean((0, 2, 3)), 1e-3)
    return y


NORMS = ("backbone", "backbone.norm1", "backbone.norm2")


@case("bug", "frozen part in training mode", frozen, module=NORMS)
def backbone_left_in_training_mode(model):
    """The rewritten network lacks the ``train`` that keeps the backbone in evaluation mode."""

    class Net(nn.Module):
        def __init__(self, net: Frozen):
            super().__init__()
            self.trunk, self.top = net.backbone, nn.Sequential(net.fc1, net.act, net.fc2)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.trunk(x))

    return Net(model).train()


@case("bug", "state kept for equal sizes", tagger, module="lstm", step=8)
def backward_state_kept_for_equal_batches(model):
    """The backward direction starts from its last state where two batches in a row are of one size."""

    class Hand(HandLSTM):
        kept = None

        def start(self, direction, x):
            if direction and self.training and self.kept is not None and len(self.kept[0]) == len(x):
                return tuple(state.to(x.dtype) for state in self.kept)
            return super().start(direction, x)

        def finish(self, direction, h, c):
            if direction and self.training:
                self.kept = h.detach(), c.detach()

    return by_hand(model, Hand)


@case("bug", "weights of the last batch", vgg, module="fc1", step=1)
def product_with_the_weights_of_the_last_batch(model):
    """The product uses a copy of the weight taken a step ago; the gradient reaches the weight itself."""

    class Linear(nn.Linear):
        def forward(self, x):
            if not self.training:
                return super().forward(x)
            now = self.weight.detach().clone()
            step = 0 if self.old is None else now - self.old.to(now)
            self.old = now
            return F.linear(x, self.weight - step, self.bias)

    return recast(model, "fc1", Linear, old=None)


@case("bug", "dropout mask kept", vgg, module="drop3", step=1)
def mask_kept_for_equal_sizes(model):
    """A mask is drawn as it should be, then used again until the size of the batch changes."""

    class Dropout(nn.Dropout):
        def forward(self, x):
            if not self.training:
                return x
            if self.mask is None or self.mask.shape != x.shape:
                self.mask = F.dropout(torch.ones_like(x), self.p)
            return x * self.mask.to(x.dtype)

    return recast(model, "drop3", Dropout, mask=None)


@inside(StackedMixture, "weights", "mixture", "fewer experts in evaluation", mixture, passes="eval")
def one_expert_in_evaluation(self, x):
    """Experts stacked; in evaluation only the best one is asked."""
    if self.training:
        return StackedMixture.weights(self, x)
    return F.one_hot(self.switch(x).argmax(-1), len(self.up_w)).to(x.dtype)
