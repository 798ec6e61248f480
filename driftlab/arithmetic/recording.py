"""What every module was given in one training step: its arguments, and the gradients that came back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.network.calling import copied, named_leaves, seed_random_layers

# A module that is called again and again (a recurrent cell) is kept at its first calls and its last.
FIRST_CALLS = 2


def record(network: nn.Module, whole: Recorded, seed: int = 0) -> dict[str, list[Recorded]]:
    """The calls of every module of a copy of ``network``, by name, in the order in which they began.

    Calls that no gradient came back to are kept where a module has no others (a frozen part).
    """
    network, calls, order = copied(network), {}, []
    for name, module in network.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            _watch(module, name, calls, order)
    seed_random_layers(seed)
    whole.loss(whole.call(network, *own_inputs(whole)), "float32").backward()
    kept = {name: _chosen(calls.get(name, [])) for name in order}
    return {name: found for name, found in kept.items() if found}


def _chosen(calls: list[Recorded]) -> list[Recorded]:
    useful = [c for c in calls if any(g is not None for g in c.gradients.values())] or calls
    return useful if len(useful) <= FIRST_CALLS + 1 else [*useful[:FIRST_CALLS], useful[-1]]


def _watch(module: nn.Module, name: str, calls: dict[str, list[Recorded]], order: list[str]) -> None:
    open_calls: list[Recorded] = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if name not in calls:
            calls[name] = []
            order.append(name)
        open_calls.append(Recorded(_kept(args), _kept(kwargs)))

    def after(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        call = open_calls.pop()
        leaves = named_leaves(output)
        call.gradients = dict.fromkeys(leaves)
        for name_of, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_hook(_keeper(call, name_of))
        calls[name].append(call)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def _keeper(call: Recorded, name: str) -> Callable[[Tensor | None], None]:
    def keep(gradient: Tensor | None) -> None:
        if gradient is not None:  # a kernel without a backward pass sends none
            call.gradients[name] = gradient.detach().clone()

    return keep


def _kept(values: object) -> object:
    """Copies: a module may write into what it is given. Which of them take a gradient is kept too."""

    def kept(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return pytree.tree_map_only(Tensor, kept, values)
