"""Reduced precision in the backward pass alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.backward import Backward, own_backward
from bench.case import method_of
from bench.cases._heldout_fault_parts import low, low_if_single
from bench.cases._heldout_fault_sequence import AddNorm
from bench.cases._heldout_fault_tasks import mobile, recommender, translator, unet, vgg


@method_of("fc1", "reduced_precision", "all-reduce", vgg, passes="weight gradient")
def weight_gradient_reduced_in_bfloat16(self, x):
    """The weight gradients of four shares of the batch are added up after a trip through bfloat16."""

    def backward(g, x, weight, bias):
        shares = zip(g.tensor_split(4), x.tensor_split(4), strict=True)
        return g @ weight, sum(low(a.T @ b) for a, b in shares), g.sum(0)

    return own_backward(F.linear, backward)(x, self.weight, self.bias)


@method_of(
    "decoder.1.add2", "reduced_precision", "gradient of one input", translator, passes="input gradient"
)
def branch_gradient_in_bfloat16(self, x, branch):
    """Of a sum's two inputs the branch gets its gradient in bfloat16."""
    return AddNorm.forward(self, x, Backward.apply(branch, low))


@method_of("item", "reduced_precision", "table's gradient", recommender, passes="weight gradient")
def item_gradient_added_up_in_float16(self, rows):
    """The gradient of an embedding is a float16 table."""

    def backward(g, rows, table):
        return None, torch.zeros_like(table, dtype=torch.float16).index_add(0, rows, g.half()).to(g.dtype)

    return own_backward(lambda rows, table: table[rows], backward)(rows, self.weight)


@method_of(
    "dec1.norm", "reduced_precision", "float16 gradient without scaling", unet, passes="input gradient"
)
def small_gradients_in_float16(self, x):
    """The gradient of a map goes through float16, where values below 1e-7 vanish and small ones lose bits."""
    return nn.BatchNorm2d.forward(self, Backward.apply(x, lambda g: low(g, torch.float16)))


@method_of("blocks.2.act2", "reduced_precision", "derivative from a table", mobile, passes="input gradient")
def derivative_in_bfloat16(self, x):
    """Hardswish is exact; its derivative is multiplied from a bfloat16 copy, in float32 only."""
    slope = low_if_single(torch.where(x.abs() < 3, (2 * x + 3) / 6, (x > 0).to(x.dtype))).detach()
    return nn.Hardswish.forward(self, x).detach() + slope * (x - x.detach())


GATE, EITHER = "blocks.1.se.gate", ("round_off", "reduced_precision")


@method_of(GATE, EITHER, "constant in float32", mobile, module=GATE, passes="input gradient")
def hard_sigmoid_by_clamp(self, x):
    """A clamp for the library's hard sigmoid, whose own backward pass has 1/6 in float32 even in float64."""
    return (x + 3).clamp(0, 6) / 6
