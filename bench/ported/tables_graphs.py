"""Graph networks by dense matrices."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._tables_graphs import DenseGAT, Kipf, gat, gcn

CONVS = ("conv1", "conv2", "conv3")


@case(SAME, "dense graph", gcn)
def gcn_by_a_matrix(model: nn.Module) -> nn.Module:
    return Kipf(model)


@case("bug", "normalisation of a graph", gcn, module=CONVS)
def gcn_normalised_by_rows(model: nn.Module, right: bool = False) -> nn.Module:
    """Edges are divided by the target's degree, not by the roots of both degrees."""
    return Kipf(model, rows=not right)


@case(SAME, "dense graph", gat)
def gat_by_a_matrix(model: nn.Module) -> nn.Module:
    return DenseGAT(model)


@case("bug", "slope", gat, module=("gat1", "gat2", "gat1.act", "gat2.act"))
def gat_with_the_default_slope(model: nn.Module, right: bool = False) -> nn.Module:
    """The leaky ReLU of the scores has PyTorch's slope of 0.01, not 0.2."""
    return DenseGAT(model, slope=0.2 if right else 0.01)
