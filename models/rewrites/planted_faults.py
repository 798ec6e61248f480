"""Rewrites that are wrong on purpose, each by a mistake that is easily made in one, and of different sizes.

``planted_bug.py`` holds one more, the suite's known bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from models.rewrites.late_faults import Scaled
from models.rewrites.split_conv import SideBySide, sizes_for_groups, split_outputs
from models.rewrites.swap import Join, RewriteError, swap_convs

Match = str | Iterable[str] | None


class SecondScaled(SideBySide):
    """Two convs side by side; the weight gradient of the second comes out ``factor`` times too large."""

    factor = 1.001

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts
        weight = Scaled.apply(second.weight, self.factor)
        scaled = second._conv_forward(self.read(x, 1), weight, second.bias)
        return torch.cat([first(self.read(x, 0)), scaled], dim=-3)


class Swapped(SideBySide):
    """Two convs side by side, the second one's outputs first."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (part(self.read(x, index)) for index, part in enumerate(self.parts))
        return torch.cat([second, first], dim=-3)


def split_with_scaled_gradient(model: nn.Module, match: Match = None) -> nn.Module:
    """Split convs in two, in place; the second half's weight gradient is 0.1 % too large.

    So comes out a gradient written by hand that divides by the wrong count. The forward pass and the
    input gradient are those of the right split.

    Args:
        match: which convs, as in ``swap_convs``; None for every conv with two output channels or more.

    Raises:
        RewriteError: for a conv with a single output channel.
    """
    return swap_convs(model, halves("split_with_scaled_gradient", SecondScaled), match)


def split_with_frozen_half(model: nn.Module, match: Match = None) -> nn.Module:
    """Split convs in two, in place; the second half is never updated.

    So comes out a weight that was copied into the new layer without its gradient. The forward pass and the
    input gradient are those of the right split.

    Args, Raises: as in ``split_with_scaled_gradient``.
    """
    right = halves("split_with_frozen_half", SideBySide)

    def rewrite(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        module, joins = right(conv, name)
        module.parts[1].requires_grad_(False)
        return module, joins

    return swap_convs(model, rewrite, match)


def split_with_swapped_halves(model: nn.Module, match: Match = None) -> nn.Module:
    """Split convs in two, in place, and concatenate the halves in the wrong order.

    Each output channel has the right weights and stands in another one's place.

    Args, Raises: as in ``split_with_scaled_gradient``.
    """
    return swap_convs(model, halves("split_with_swapped_halves", Swapped), match)


def batch_norm_with_other_eps(model: nn.Module, eps: float = 1e-3, match: str = "*") -> nn.Module:
    """Give the BatchNorm2d layers of ``model`` another ``eps``, in place.

    torch's default is 1e-5, Keras's 1e-3: whoever builds a layer anew easily gets the other one.

    Args:
        match: an fnmatch pattern on the dotted names.

    Raises:
        RewriteError: no BatchNorm2d has such a name.
    """
    norms = [m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and fnmatchcase(n, match)]
    if not norms:
        raise RewriteError(f"batch_norm_with_other_eps: match={match!r} names no nn.BatchNorm2d of the model")
    for norm in norms:
        norm.eps = eps
    return model


def halves(function: str, kind: type[SideBySide]) -> Callable:
    """How ``function`` rewrites a conv: as the two halves of its output channels, in a module of ``kind``."""

    def rewrite(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        if conv.out_channels < 2:
            raise RewriteError(f"{function}: {name} has 1 output channel; match wider convs")
        return split_outputs(conv, sizes_for_groups(conv.out_channels, conv.groups, 2), name, kind=kind)

    return rewrite
