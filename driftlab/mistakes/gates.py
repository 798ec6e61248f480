"""Gates of recurrent layers that stand in another order, or close where they ought to open.

Libraries order them otherwise, and some write ``h = z * old + (1 - z) * new`` where others exchange the two
(Cho et al., 2014, against Chung et al., 2014).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from driftlab.arithmetic.shadow import held

GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}


def other_gates(network: nn.Module) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The module, what is changed in words, and what changes it in a network; of each layer and direction."""
    for name, module in network.named_modules():
        count = GATES.get(type(module), 0)
        layers: defaultdict[str, list[str]] = defaultdict(list)
        for own, parameter in module.named_parameters() if count else ():
            if len(parameter) % count == 0:
                layers[_layer(own)].append(own)
        every = [own for names in layers.values() for own in names]
        for layer, names in (*layers.items(), *([("", every)] if len(layers) > 1 else [])):
            for words, change in _changes(count):
                of, where = f" of `{name}`" if name else "", f" in `{layer}`" if layer else ""
                yield name, f"{words}{of}{where}", partial(_change, name, names, change)


@torch.no_grad()
def _change(
    module: str, names: Sequence[str], change: Callable[[Tensor], Tensor], network: nn.Module
) -> None:
    own = dict(network.get_submodule(module).named_parameters())
    for name in names:
        values = held(own[name])
        values.copy_(change(values.clone()))


def _layer(parameter: str) -> str:
    """As ``l0_reverse``; "" of a cell."""
    at = parameter.rfind("_l")
    return "" if at < 0 or not parameter[at + 2 : at + 3].isdigit() else parameter[at + 1 :]


def _changes(count: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    for one, other in combinations(range(count), 2):
        order = [*range(count)]
        order[one], order[other] = other, one
        yield f"gates {one + 1} and {other + 1}", partial(_in_order, order)
    for gate in range(count):
        yield f"the other side of gate {gate + 1}", partial(_turned_over, count, gate)


def _in_order(order: Sequence[int], values: Tensor) -> Tensor:
    parts = values.chunk(len(order))
    return torch.cat([parts[at] for at in order])


def _turned_over(count: int, gate: int, values: Tensor) -> Tensor:
    """``sigmoid(-x) = 1 - sigmoid(x)``"""
    parts = [*values.chunk(count)]
    parts[gate] = -parts[gate]
    return torch.cat(parts)
