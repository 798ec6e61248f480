"""Mistakes in how weights and buffers are used: one that is not, two in each other's place, one too late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from driftlab.arithmetic.shadow import held
from driftlab.network.modules import common

# Of as many weights of one shape that lie side by side any two may be exchanged: query, key, value, output.
SIDE_BY_SIDE = 6


def weight_mutations(
    network: nn.Module, left: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The module that owns them, what is changed in words, and what changes it in a network.

    Args:
        left: buffers that a call changes, as it leaves them.
    """
    tensors = _tensors(network)
    beside: dict[tuple, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        owner = name.rpartition(".")[0]
        yield owner, f"`{name}` left out", partial(_set, {name: torch.zeros(())})
        beside[owner.rpartition(".")[0], tensor.shape, tensor.requires_grad].append(name)
    for names in beside.values():
        for pair in combinations(names, 2) if len(names) <= SIDE_BY_SIDE else ():
            owner = common([name.rpartition(".")[0] for name in pair])
            yield owner, f"`{pair[0]}` and `{pair[1]}` exchanged", partial(_exchange, *pair)
    for name, tensor in left.items():
        words = f"`{name}` as the call leaves it"
        yield name.rpartition(".")[0], words, partial(_set, {name: tensor})


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    both = dict(network.named_parameters()) | dict(network.named_buffers())
    return {name: tensor for name, tensor in both.items() if tensor.is_floating_point()}


@torch.no_grad()
def _set(values: Mapping[str, Tensor], network: nn.Module) -> None:
    own = _tensors(network)
    for name, value in values.items():
        held(own[name]).copy_(value)


def _exchange(one: str, other: str, network: nn.Module) -> None:
    own = _tensors(network)
    _set({one: held(own[other]).clone(), other: held(own[one]).clone()}, network)
