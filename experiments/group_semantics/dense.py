"""A grouped conv as one with groups=1: its blocks on the diagonal of the weight, zeros elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Blocks(nn.Conv2d):
    """A conv with groups=1 whose weight [out, in, kH, kW] counts only where ``mask`` is one."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.register_buffer("mask", torch.ones_like(self.weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


def dense_weight(weight: Tensor, groups: int) -> Tensor:
    """[out, in / groups, kH, kW] -> [out, in, kH, kW], zero outside the blocks."""
    out, inputs = weight.shape[:2]
    dense = weight.new_zeros(out, groups * inputs, *weight.shape[2:])
    for g in range(groups):
        rows = slice(g * out // groups, (g + 1) * out // groups)
        dense[rows, g * inputs : (g + 1) * inputs] = weight[rows]
    return dense


def diagonal_blocks(weight: Tensor, groups: int) -> Tensor:
    """[out, in, kH, kW] -> [out, in / groups, kH, kW]: what ``dense_weight`` began with."""
    pairs = zip(weight.chunk(groups), range(groups), strict=True)
    return torch.cat([rows.chunk(groups, dim=1)[g] for rows, g in pairs])


def without_groups(model: nn.Module, masked: bool = False) -> nn.Module:
    """Every grouped conv of ``model`` with groups=1 and the same numbers, in place; the fold comes with it.

    Args:
        masked: the zeros stay zeros in training; otherwise they are weights like all others.
    """
    convs = _grouped(model)
    groups = {f"{name}.weight" if name else "weight": conv.groups for name, conv in convs.items()}
    model = _replaced(model, {name: _same_numbers(conv, masked) for name, conv in convs.items()})
    model.fold = lambda tensors: {
        n: diagonal_blocks(t, groups[n]) if n in groups else t for n, t in tensors.items()
    }
    return model


def own_weights(model: nn.Module) -> nn.Module:
    """Every grouped conv of ``model`` with groups=1 and fresh weights of its own, in place."""
    return _replaced(model, {name: _plain_like(conv) for name, conv in _grouped(model).items()})


def _grouped(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1}


def _replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The model, or what stands for it where it is itself replaced."""
    for name, module in modules.items():
        if not name:
            return module
        model.set_submodule(name, module)
    return model


def _plain_like(conv: nn.Conv2d, kind: type[nn.Conv2d] = nn.Conv2d) -> nn.Conv2d:
    sizes = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    return kind(*sizes, bias=conv.bias is not None, padding_mode=conv.padding_mode).to(conv.weight)


@torch.no_grad()
def _same_numbers(conv: nn.Conv2d, masked: bool) -> nn.Conv2d:
    dense = _plain_like(conv, Blocks if masked else nn.Conv2d)
    dense.weight.copy_(dense_weight(conv.weight, conv.groups))
    if conv.bias is not None:
        dense.bias.copy_(conv.bias)
    if masked:
        dense.mask.copy_(dense_weight(torch.ones_like(conv.weight), conv.groups))
    return dense
