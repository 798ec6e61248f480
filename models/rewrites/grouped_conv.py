"""Between a grouped conv and plain convs side by side: the same function, either way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.rewrites.split_conv import split_outputs
from models.rewrites.swap import Join, RewriteError, conv_like, joins_of_inner, swap_convs


class RepeatedInput(nn.Module):
    """A grouped conv that sees its input several times over: [..., C, H, W] -> [..., out, H', W'].

    Args:
        conv: with groups x times groups, each of which reads C / groups channels.
        groups: of the original conv; each one's slice of the input is repeated.
        times: how often.
    """

    def __init__(self, conv: nn.Conv2d, groups: int, times: int):
        super().__init__()
        self.conv = conv
        self.groups = groups
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        by_group = x.unflatten(-3, (self.groups, x.shape[-3] // self.groups))
        return self.conv(torch.cat([by_group] * self.times, dim=-3).flatten(-4, -3))


def separate_groups(model: nn.Module, match: str | Iterable[str] | None = None) -> nn.Module:
    """Every conv with groups=g as g plain convs on the slices of the input, concatenated; in place.

    Args:
        match: which convs, as in ``swap_convs``; None for every grouped conv.

    Raises:
        RewriteError: for a conv with groups=1.
    """

    def rewrite(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        if conv.groups == 1:
            raise RewriteError(f"separate_groups: {name} has groups=1; match a conv with 2 groups or more")
        return split_outputs(conv, [conv.out_channels // conv.groups] * conv.groups, name)

    return swap_convs(model, rewrite, match)


def as_grouped(model: nn.Module, groups: int = 2, match: str | Iterable[str] | None = None) -> nn.Module:
    """Every conv as one grouped conv that sees its input ``groups`` times over; in place.

    Each group reads all of the input, so the weight keeps its shape [out, in, kH, kW]. A conv that has g
    groups already gets g x ``groups`` of them, and each group's slice of the input is seen ``groups`` times.

    Args:
        match: which convs, as in ``swap_convs``; None for every conv that ``groups`` fits.

    Raises:
        RewriteError: where ``groups`` does not divide the output channels of a group.
    """
    if not isinstance(groups, int) or groups < 1:
        raise RewriteError(f"as_grouped: groups={groups!r} must be a whole number, 1 or more")

    def rewrite(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        outputs = conv.out_channels // conv.groups
        if outputs % groups:
            works = [n for n in range(1, outputs + 1) if outputs % n == 0]
            raise RewriteError(
                f"as_grouped: {name} has {outputs} output channels per group, which groups={groups} does not "
                f"divide; write one of {works[:8]}"
            )
        grouped = conv_like(conv, conv.weight, conv.bias, conv.groups * groups)
        return RepeatedInput(grouped, conv.groups, groups), joins_of_inner(conv)

    return swap_convs(model, rewrite, match)
