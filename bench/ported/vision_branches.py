"""Inception blocks whose reductions are fused, and a DenseNet that keeps a list."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._vision_branches import Collected, Fused, densenet, inception


@case(SAME, "branches fused", inception)
def inception_with_fused_reductions(model: nn.Module) -> nn.Module:
    return Fused(model)


@case("bug", "padding in the average", inception, module=("mixed_a.pool", "mixed_b.pool"))
def inception_averaging_without_the_padding(model: nn.Module, right: bool = False) -> nn.Module:
    """The average pool leaves the padding out of the count, as TensorFlow's does."""
    return Fused(model, padded=right)


@case(SAME, "concatenation split", densenet)
def densenet_of_a_list(model: nn.Module) -> nn.Module:
    return Collected(model)
