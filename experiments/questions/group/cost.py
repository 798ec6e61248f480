"""Parameters and multiply-adds, layer by layer; counted on the meta device, where nothing is computed."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def costs(net: nn.Module, inputs: tuple[int, ...]) -> dict[str, dict]:
    """Every conv and linear layer of ``net`` in one forward pass of inputs of this shape.

    Returns:
        name -> "weight" (its shape), "parameters" (biases included), "macs" (multiply-adds of the products; a
        bias adds none). FlopCounterMode counts two operations for each.
    """
    net = copy.deepcopy(net).to("meta")
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(inputs, device="meta"))
    flops = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    root = type(net).__name__
    return {
        name: {
            "weight": list(layer.weight.shape),
            "groups": getattr(layer, "groups", None),
            "stride": _size(layer, "stride"),
            "padding": _size(layer, "padding"),
            "parameters": sum(p.numel() for p in layer.parameters()),
            "macs": flops[f"{root}.{name}"] // 2,
        }
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


def _size(layer: nn.Module, name: str) -> int | None:
    """Equal in both directions in every conv here; a linear layer has none."""
    return getattr(layer, name)[0] if isinstance(layer, nn.Conv2d) else None
