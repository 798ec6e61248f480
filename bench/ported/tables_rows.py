"""Networks for rows: one table for all categories, projections apart, a chain of bijectors."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._tables_flows import Chain, Squares, deepfm, flow
from bench.ported._tables_rows import FeatureTransformer, OneTable, entities, tokens


@case(SAME, "tables joined", entities)
def entities_in_one_table(model: nn.Module) -> nn.Module:
    return OneTable(model)


@case("bug", "padding index", entities, module="embeddings.0", passes="weight gradient")
def entities_padded_by_their_first_row(model: nn.Module, right: bool = False) -> nn.Module:
    """The joint table has padding_idx 0, so that the first category's first value does not learn."""
    return OneTable(model, padding=None if right else 0)


@case("bug", "statistics in eval", entities, module="norm", passes="eval")
def entities_normed_by_the_batch_in_eval(model: nn.Module, right: bool = False) -> nn.Module:
    """In eval mode the numbers are normalised by the batch's statistics."""
    return OneTable(model, always=not right)


@case("bug", "mean of a weighted loss", entities, module="criterion")
def entities_with_the_loss_over_the_count(model: nn.Module, right: bool = False) -> nn.Module:
    """The weighted loss is divided by the number of rows, not by the sum of their weights."""
    return OneTable(model, by_count=not right)


@case(SAME, "projections apart", tokens)
def tokens_with_projections_apart(model: nn.Module) -> nn.Module:
    return FeatureTransformer(model)


@case(SAME, "outputs in a tuple", flow, optimizer=sgd(0.02))
def flow_of_bijectors(model: nn.Module) -> nn.Module:
    return Chain(model)


@case("bug", "bound left out", flow, module="couplings.1", optimizer=sgd(0.02))
def flow_with_an_unbounded_scale(model: nn.Module, right: bool = False) -> nn.Module:
    """The second coupling's logarithm of the scale is not bounded by 2 tanh(s / 2)."""
    return Chain(model, bounded=right)


@case(SAME, "pairs by squares", deepfm)
def deepfm_by_squares(model: nn.Module) -> nn.Module:
    return Squares(model)
