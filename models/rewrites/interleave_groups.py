"""Grouped convs whose groups read interleaved channels: another function, and an easy mistake to make."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from models.rewrites.swap import Join, RewriteError, conv_like, joins_of_inner, swap_convs


class InterleavedGroups(nn.Module):
    """A grouped conv in which group g of G reads the channels g, g + G, g + 2 G, ...: [..., C, H, W].

    nn.Conv2d lets group g read the contiguous channels g C/G to (g + 1) C/G - 1. Whoever deals the channels
    out in turns, or shuffles them as ShuffleNet does (Zhang et al., CVPR 2018) and forgets to shuffle back,
    gets this instead. The outputs stay in their places.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        groups = self.conv.groups
        dealt = x.unflatten(-3, (x.shape[-3] // groups, groups)).transpose(-4, -3)
        return self.conv(dealt.flatten(-4, -3))


def interleave_groups(model: nn.Module, match: str | Iterable[str] | None = None) -> nn.Module:
    """Every grouped conv as ``InterleavedGroups`` with the same weights, in place: not the same function.

    Args:
        match: which convs, as in ``swap_convs``; None for every grouped conv.

    Raises:
        RewriteError: for a conv with groups=1, which reads every channel in either order.
    """

    def rewrite(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        if conv.groups == 1:
            raise RewriteError(f"interleave_groups: {name} has groups=1; match a conv with 2 groups or more")
        return InterleavedGroups(conv_like(conv, conv.weight, conv.bias, conv.groups)), joins_of_inner(conv)

    return swap_convs(model, rewrite, match)
