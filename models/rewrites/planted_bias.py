"""A rewrite that is wrong on purpose: it trains like any other at ordinary rates, and diverges sooner."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from models.rewrites.swap import RewriteError


class EveryBias(nn.Module):
    """[..., in] -> [..., out]: a linear layer as a sum over slices of its inputs, each with the bias.

    The bias has to be added once. So it counts as many times as there are slices, and its gradient too: a
    step moves the outputs by the square of that more than it should.
    """

    def __init__(self, linear: nn.Linear, parts: int):
        super().__init__()
        pieces = linear.weight.detach().tensor_split(parts, dim=1)
        self.parts = nn.ParameterList(nn.Parameter(piece.clone()) for piece in pieces)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        slices = x.split([part.shape[1] for part in self.parts], dim=-1)
        return sum(F.linear(piece, part, self.bias) for piece, part in zip(slices, self.parts, strict=True))


def split_linear_with_every_bias(model: nn.Module, parts: int = 3) -> nn.Module:
    """Split the linear layers of ``model`` along their inputs, in place; each part adds the bias once more.

    Args:
        parts: how many.

    Raises:
        RewriteError: there is no linear layer with a bias, or one has fewer inputs than parts.
    """
    found = {n: m for n, m in model.named_modules() if n and type(m) is nn.Linear and m.bias is not None}
    if not found:
        raise RewriteError(f"the model ({type(model).__name__}) has no nn.Linear with a bias inside it")
    for name, linear in found.items():
        if not 1 <= parts <= linear.in_features:
            raise RewriteError(f"{name} has {linear.in_features} inputs: parts={parts} must be 1 to that")
        model.set_submodule(name, EveryBias(linear, parts))
    return model
