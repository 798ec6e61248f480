"""Changing one module of a network: another in its place, or another class for the same weights."""

from __future__ import annotations

from torch import nn


def replace(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """``model`` with ``module`` in place of its submodule ``name``; "" is the whole network."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def recast(model: nn.Module, name: str, kind: type[nn.Module], **attributes: object) -> nn.Module:
    """``model`` whose submodule ``name`` computes as ``kind`` does, with the weights and settings it has.

    Args:
        attributes: further plain attributes of the submodule.
    """
    module = model.get_submodule(name)
    module.__class__ = kind
    for key, value in attributes.items():
        setattr(module, key, value)
    return model
