"""What the true rewrites share: their labels, and modules that take over another module's weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.surgery import replace

SAME = ("round_off", "bit_identical")


def rewritten(model: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """``model`` with ``make(module)`` where its submodule ``name`` was."""
    return replace(model, name, make(model.get_submodule(name)))


def copied(values: Tensor) -> nn.Parameter:
    """A parameter of its own with these values, contiguous."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))


def filled(module: nn.Module, **weights: Tensor) -> nn.Module:
    """``module`` whose parameters of these names are copies of these values, of the same shape."""
    for name, values in weights.items():
        assert getattr(module, name).shape == values.shape, name
        setattr(module, name, copied(values))
    return module


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    return filled(layer, weight=weight, **({} if bias is None else {"bias": bias}))


class ConvWeights(nn.Module):
    """The weights and settings of a square 2-D conv, transposed or not; subclasses say how it is computed."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.kernel, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
        self.groups = conv.groups

    def padded(self, x: Tensor) -> Tensor:
        """The images with the zeros around them."""
        return nn.functional.pad(x, (self.padding,) * 4)

    def with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias[:, None, None]


class LinearWeights(nn.Module):
    """The weights of a linear layer; subclasses say how it is computed."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
