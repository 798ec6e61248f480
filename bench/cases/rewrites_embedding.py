"""True rewrites of an embedding and of the head that shares its weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of
from bench.cases._rewritten import SAME
from bench.tasks import dropout_transformer, transformer


class Table(nn.Module):
    """The weight of an embedding, still shared with the head; subclasses look up its rows."""

    def __init__(self, embed: nn.Embedding):
        super().__init__()
        self.weight = embed.weight


@in_place_of("embed", SAME, "embedding as a matrix product", transformer, "embedding_by_one_hot")
class OneHot(Table):
    """One-hot tokens times the embedding's weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens, len(self.weight)).to(self.weight.dtype) @ self.weight


@in_place_of("embed", SAME, "embedding by index", dropout_transformer, "embedding_by_index")
class Indexed(Table):
    """``weight[tokens]``."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


@in_place_of("", SAME, "tied head", transformer, "tied_head_by_functional_linear")
class WithoutHead(nn.Module):
    """No head module: ``F.linear(x, embed.weight)``; the position is registered under another name."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.wte, self.wpe = model.embed, model.position
        self.blocks, self.norm = model.blocks, model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)
