"""Reduced precision in the backward pass alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import (
    Backward,
    low,
    low_if_single,
    recast,
)
from experiments.calibration.cases._heldout_fault_sequence import AddNorm
from experiments.calibration.cases._heldout_fault_tasks import (
    mobile,
    recommender,
    translator,
    unet,
    vgg,
)


class Replicated(torch.autograd.Function):
    """A linear layer whose weight gradient is the sum of four replicas' shares, each sent in bfloat16."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        shares = zip(g.tensor_split(4), x.tensor_split(4), strict=True)
        return g @ weight, sum(low(a.T @ b) for a, b in shares), g.sum(0)


@case("reduced_precision", "all-reduce", vgg, module="fc1", passes="weight gradient")
def weight_gradient_reduced_in_bfloat16(model):
    """The weight gradients of four shares of the batch are added up after a trip through bfloat16."""

    class Linear(nn.Linear):
        def forward(self, x):
            return Replicated.apply(x, self.weight, self.bias)

    return recast(model, "fc1", Linear)


@case(
    "reduced_precision", "gradient of one input", translator, module="decoder.1.add2", passes="input gradient"
)
def branch_gradient_in_bfloat16(model):
    """Of a sum's two inputs the branch gets its gradient in bfloat16."""

    class Add(AddNorm):
        def forward(self, x, branch):
            return super().forward(x, Backward.apply(branch, low))

    return recast(model, "decoder.1.add2", Add)


class HalfTable(torch.autograd.Function):
    """A lookup whose gradient is added up in a float16 table."""

    @staticmethod
    def forward(ctx, rows, table):
        ctx.save_for_backward(rows)
        ctx.size = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx, g):
        (rows,) = ctx.saved_tensors
        table = torch.zeros(ctx.size, dtype=torch.float16, device=g.device)
        return None, table.index_add(0, rows, g.half()).to(g.dtype)


@case("reduced_precision", "table's gradient", recommender, module="item", passes="weight gradient")
def item_gradient_added_up_in_float16(model):
    """The gradient of an embedding is a float16 table."""

    class Lookup(nn.Embedding):
        def forward(self, rows):
            return HalfTable.apply(rows, self.weight)

    return recast(model, "item", Lookup)


@case(
    "reduced_precision", "float16 gradient without scaling", unet, module="dec1.norm", passes="input gradient"
)
def small_gradients_in_float16(model):
    """The gradient of a map goes through float16, where values below 1e-7 vanish and small ones lose bits."""

    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(Backward.apply(x, lambda g: low(g, torch.float16)))

    return recast(model, "dec1.norm", Norm)


@case("reduced_precision", "derivative from a table", mobile, module="blocks.2.act2", passes="input gradient")
def derivative_in_bfloat16(model):
    """Hardswish is exact; its derivative is multiplied from a bfloat16 copy, in float32 only."""

    class Act(nn.Hardswish):
        def forward(self, x):
            slope = low_if_single(torch.where(x.abs() < 3, (2 * x + 3) / 6, (x > 0).to(x.dtype))).detach()
            return super().forward(x).detach() + slope * (x - x.detach())

    return recast(model, "blocks.2.act2", Act)


@case(
    ("round_off", "reduced_precision"),
    "constant in float32",
    mobile,
    module="blocks.1.se.gate",
    passes="input gradient",
)
def hard_sigmoid_by_clamp(model):
    """A clamp for the library's hard sigmoid, whose own backward pass has 1/6 in float32 even in float64."""

    class Gate(nn.Hardsigmoid):
        def forward(self, x):
            return (x + 3).clamp(0, 6) / 6

    return recast(model, "blocks.1.se.gate", Gate)
