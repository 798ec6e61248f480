"""Wrong initial weights in networks rewritten rightly, faults beside another peculiarity, wrong gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.backward import Backward
from bench.case import GRADIENTS, case, in_place_of
from bench.cases._heldout_fault_parts import low
from bench.cases._heldout_fault_tasks import frozen, masked, mixture, mobile, recommender, tagger, vgg
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import PackedEncoder, StackedMixture, by_hand, stacked
from bench.optimizers import sgd
from bench.surgery import recast


@case("bug", "bias of another expert", mixture, module="mixture.experts.2.down")
def bias_of_another_expert(model):
    """Experts stacked and permuted; the third's last bias is a copy of the second's."""
    with torch.no_grad():
        model.mixture.experts[2].down.bias.copy_(model.mixture.experts[1].down.bias)
    return stacked(model)


@case("bug", "one row off", masked, module="layers.1.mlp.up")
def one_row_a_bfloat16_step_too_large(model):
    """One row of a weight was multiplied by 1 + 2^-8 when it was carried over; nothing is rounded."""
    with torch.no_grad():
        model.layers[1].mlp.up.weight[3] *= 1 + 2**-8
    return PackedEncoder(model)


@case("bug", "two layers scaled", vgg, module=("conv1", "conv2"), passes=("forward", "update"))
def scale_moved_from_one_conv_to_the_next(model):
    """One conv is doubled and the next halved, which ReLU lets through: the same loss, another descent."""
    with torch.no_grad():
        model.conv1.weight *= 2
        model.conv1.bias *= 2
        model.conv2.weight /= 2
    return model


@case("bug", "weights of the other direction", tagger, module="lstm")
def recurrent_weights_of_one_direction_for_both(model):
    """Both directions start from the recurrent weights of the first."""
    model = by_hand(model)
    model.lstm.states[1].load_state_dict(model.lstm.states[0].state_dict())
    return model


@case("bug", "two rows exchanged", recommender, module="item")
def two_items_exchanged(model):
    """The rows of two items were exchanged when the table was sorted anew; only two late batches hold one."""
    with torch.no_grad():
        model.item.weight[[39, 66]] = model.item.weight[[66, 39]]
    return model


@case(
    "bug",
    "running statistics through half",
    frozen,
    module="backbone.norm2",
    passes=("forward", "eval", "buffer"),
)
def running_variance_through_float16(model):
    """A frozen norm's running variance was stored in float16 once; the float32 buffer has the rounded one."""
    norm = model.backbone.norm2
    norm.running_var.copy_(low(norm.running_var, torch.float16))
    return model


@case("bug", "low logits and a wrong layer", masked, module="layers.0.norm1")
def wrong_eps_below_bfloat16_logits(model):
    """The logits are in bfloat16 by intention; besides, an early norm's eps is 1e-3 for 1e-5."""

    class Head(nn.Linear):
        def forward(self, x):
            return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype) + self.bias

    model.layers[0].norm1.eps = 1e-3
    return recast(model, "fc", Head)


@case("bug", "exploding run", mobile, module="blocks.2.norm2", passes="buffer", optimizer=sgd(5.0))
def running_momentum_in_an_exploding_run(model):
    """The training explodes by itself; besides, one norm's running statistics move by 0.11 for 0.1."""
    model.blocks[2].norm2.momentum = 0.11
    return model


@in_place_of(
    "fc1",
    "bug",
    "gradient accumulated over unequal parts",
    vgg,
    "mean_of_means_of_an_odd_batch",
    passes="weight gradient",
)
class MeanOfMeansOfAnOddBatch(nn.Linear):
    """The weight gradient is accumulated over two parts of the batch as if they were of one size."""

    def forward(self, x):
        return torch.cat([self.part(part, len(x) / 2) for part in x.tensor_split(2)])

    def part(self, x, size):
        weight = Backward.apply(self.weight, lambda g: g * (size / len(x)))
        return F.linear(x, weight, self.bias)


@inside(StackedMixture, "weights", "mixture", "gate weights", mixture)
def weights_of_all_experts(self, x):
    """Experts stacked; the weights are the two best of a softmax over all four, not one over the two."""
    shares = self.switch(x).softmax(-1)
    best, chosen = shares.topk(2, -1)
    return torch.zeros_like(shares).scatter(1, chosen, best)


@inside(StackedMixture, "weights", "mixture", "second choice detached", mixture, passes=GRADIENTS)
def second_choice_detached(self, x):
    """Experts stacked; the weight of the second-best one sends no gradient to the router."""
    best, chosen = self.switch(x).topk(2, -1)
    shares = best.softmax(-1)
    shares = torch.cat([shares[:, :1], shares[:, 1:].detach()], 1)
    return torch.zeros_like(x[:, : len(self.up_w)]).scatter(1, chosen, shares)
