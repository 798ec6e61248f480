"""Copies of networks that keep what ``copy.deepcopy`` drops: the hooks on parameters."""

from __future__ import annotations

import copy

from torch import Tensor, nn


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, hooks on its parameters' gradients included."""
    twin = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        carry_hooks(mine, theirs)
    return twin


def carry_hooks(mine: Tensor, theirs: Tensor) -> None:
    """Register on ``theirs`` what is registered on ``mine`` and not on it."""
    if mine._backward_hooks and not theirs._backward_hooks:
        for hook in mine._backward_hooks.values():
            theirs.register_hook(hook)
    after = getattr(mine, "_post_accumulate_grad_hooks", None)
    if after and not getattr(theirs, "_post_accumulate_grad_hooks", None):
        for hook in after.values():
            theirs.register_post_accumulate_grad_hook(hook)
