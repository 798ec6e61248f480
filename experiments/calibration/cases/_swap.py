"""Putting a module in another's place."""

from __future__ import annotations

from torch import nn


def replace(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """``model`` with ``module`` in place of its submodule ``name``; "" is the whole network."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model
