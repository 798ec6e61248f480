"""Copies of networks that keep what ``copy.deepcopy`` drops: the hooks on parameters."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, hooks on its parameters' gradients included."""
    twin = copy.deepcopy(module, _script_copies(module))
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        carry_hooks(mine, theirs)
    return twin


def _script_copies(module: nn.Module) -> dict[int, nn.Module]:
    """TorchScript's own deep copies have parameters that no optimizer takes; stored ones are right."""
    copies: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule) and id(part) not in inside:
            inside |= {id(m) for m in part.modules()}
            stored = io.BytesIO()
            torch.jit.save(part, stored)
            stored.seek(0)
            copies[id(part)] = torch.jit.load(stored)
    return copies


def carry_hooks(mine: Tensor, theirs: Tensor) -> None:
    """Register on ``theirs`` what is registered on ``mine`` and not on it."""
    if mine._backward_hooks and not theirs._backward_hooks:
        for hook in mine._backward_hooks.values():
            theirs.register_hook(hook)
    after = getattr(mine, "_post_accumulate_grad_hooks", None)
    if after and not getattr(theirs, "_post_accumulate_grad_hooks", None):
        for hook in after.values():
            theirs.register_post_accumulate_grad_hook(hook)
