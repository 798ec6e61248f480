"""Two modules that one calls in turn, in the other order: a gate before a norm, a norm before a pooling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from driftlab.mistakes.mutant import TOGETHER, Mutant


def in_turn(network: nn.Module) -> Iterator[Mutant]:
    """Of each module those that lie side by side in it; two of one class are told by their weights."""
    for name, module in network.named_modules():
        own = [child for child, inner in module.named_children() if not isinstance(inner, nn.ModuleList)]
        for one, other in pairwise(own):
            if type(module.get_submodule(one)) is not type(module.get_submodule(other)):
                words = f"`{one}` behind `{other}`, not before it"
                first = f"{name}.{one}" if name else one
                yield Mutant(
                    name, words, TOGETHER, weights=partial(_exchange, name, one, other), made_in=first
                )


def _exchange(name: str, one: str, other: str, network: nn.Module) -> None:
    inner = network.get_submodule(name)._modules
    inner[one], inner[other] = _Channels(inner[other]), _Channels(inner[one])


class _Channels(nn.Module):
    """The module; what cannot take a map, [N, C, H, W], takes its channels as the last axis."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> object:
        try:
            return self.module(x, *args, **kwargs)
        except RuntimeError:
            return self.module(x.movedim(1, -1), *args, **kwargs).movedim(-1, 1)
