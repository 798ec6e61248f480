"""What the held-out rewrites share: filling a module with weights taken from another, under other names."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.calibration.cases._rewritten import copied


def filled(module: nn.Module, **weights: Tensor) -> nn.Module:
    """``module`` whose parameters of these names are copies of these values, of the same shape."""
    for name, values in weights.items():
        assert getattr(module, name).shape == values.shape, name
        setattr(module, name, copied(values))
    return module


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    return filled(layer, weight=weight, **({} if bias is None else {"bias": bias}))


def flat_name(name: str) -> str:
    """A parameter's dotted name as a key that ``nn.ParameterDict`` takes."""
    return name.replace(".", "_")
