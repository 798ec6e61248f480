"""What every module was given in one training step: its arguments, and the gradients that came back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.network.calling import (
    copied,
    each_tensor,
    in_list,
    named_leaves,
    seed_random_layers,
    tensors_in,
)
from driftlab.precision import Precision
from driftlab.refusing import is_dense

# A module that is called again and again (a recurrent cell) is looked at at its first calls and its last.
FIRST_CALLS = 2


def record(network: nn.Module, whole: Recorded, seed: int = 0) -> dict[str, list[Recorded]]:
    """All calls of every module of a copy of ``network``, by name, in the order in which they began.

    Less those with sparse or nested tensors, of which no distances are taken.
    """
    network, calls = copied(network), {}
    for name, module in network.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            _watch(module, name, calls, whole.precision)
    seed_random_layers(seed)
    whole.send_back(network, whole.called(network, own_inputs(whole)))
    return {name: made for name, made in calls.items() if made}


def chosen(calls: list[Recorded]) -> list[Recorded]:
    """A few calls; those that no gradient came back to where there are no others (a frozen part)."""
    useful = [c for c in calls if any(g is not None for g in c.gradients.values())] or calls
    return useful if len(useful) <= FIRST_CALLS + 1 else [*useful[:FIRST_CALLS], useful[-1]]


def in_sequence(calls: list[Recorded]) -> Recorded:
    """All ``calls`` as one, made in their order on the same module: what it keeps between them counts."""

    def call(module: nn.Module, args: tuple, _: dict) -> list[object]:
        return [module(*own, **kwargs) for own, kwargs in args]

    gradients = {
        in_list(number, name): gradient
        for number, one in enumerate(calls)
        for name, gradient in one.gradients.items()
    }
    given = tuple((c.args, c.kwargs) for c in calls)
    return Recorded(given, gradients=gradients, call=call, precision=calls[0].precision)


def _watch(module: nn.Module, name: str, calls: dict[str, list[Recorded]], precision: Precision) -> None:
    open_calls: list[Recorded] = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        calls.setdefault(name, [])
        open_calls.append(Recorded(_kept(args), _kept(kwargs), precision=precision))

    def after(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        call = open_calls.pop()
        leaves = named_leaves(output)
        if not all(map(is_dense, [*leaves.values(), *tensors_in((args, kwargs))])):
            return
        call.gradients = dict.fromkeys(leaves)
        for name_of, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_hook(partial(_keep, call, name_of))
        calls[name].append(call)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def _keep(call: Recorded, name: str, gradient: Tensor | None) -> None:
    if gradient is not None:  # a kernel without a backward pass sends none
        call.gradients[name] = gradient.detach().clone()


def _kept(values: object) -> object:
    """Copies: a module may write into what it is given. Which of them take a gradient is kept too."""

    def kept(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return each_tensor(kept, values)
