"""One copy of a network for many runs, each of which finds it as it was at first."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy

import torch
from torch import nn

from driftlab.arithmetic.shadow import held


class Anew:
    """What a run may leave is put back before the next: values of tensors, and attributes of modules.

    Attributes that are written into (but tables and lists of them) are not; a copy for each run would put
    these back as well, and take as long as the run.
    """

    def __init__(self, network: nn.Module):
        self._network = network
        self._states = [(module, _copies(vars(module))) for module in network.modules()]
        values = [held(t).detach() for t in (*network.parameters(), *network.buffers())]
        self._values = [(own, own.clone()) for own in values]

    @torch.no_grad()
    def begun(self) -> nn.Module:
        for module, state in self._states:
            vars(module).clear()
            vars(module).update(_copies(state))
        for tensor, values in self._values:
            tensor.copy_(values)
        return self._network


def _copies(state: dict) -> dict:
    """One level deep, as the tables of a module's tensors lie."""
    return {name: _copied(value) for name, value in state.items()}


def _copied(value: object) -> object:
    """``copy`` takes thirty times as long for a module's many empty tables of hooks."""
    if type(value) in (dict, list, OrderedDict):
        return value.copy()
    return copy(value) if isinstance(value, dict | list) else value
