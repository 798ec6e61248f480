"""True rewrites of an embedding and of the head that shares its weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import dropout_transformer, transformer


class OneHot(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, len(self.weight)).to(self.weight.dtype) @ self.weight


class Indexed(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class WithoutHead(nn.Module):
    """The transformer with no head of its own: the logits are products with the embedding's rows."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.wte, self.wpe = model.embed, model.position
        self.blocks, self.norm = model.blocks, model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


@case(SAME, "embedding as a matrix product", on=transformer)
def embedding_by_one_hot(model: nn.Module) -> nn.Module:
    """One-hot tokens times the embedding's weight, still shared with the head."""
    return replace(model, "embed", OneHot(model.embed.weight))


@case(SAME, "embedding by index", on=dropout_transformer)
def embedding_by_index(model: nn.Module) -> nn.Module:
    """``weight[tokens]``, the weight still shared with the head."""
    return replace(model, "embed", Indexed(model.embed.weight))


@case(SAME, "tied head", on=transformer)
def tied_head_by_functional_linear(model: nn.Module) -> nn.Module:
    """No head module: ``F.linear(x, embed.weight)``; the position is registered under another name."""
    return WithoutHead(model)
