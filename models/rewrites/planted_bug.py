"""A rewrite that is wrong on purpose: the suite's known bug, which no look at the forward pass can find."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from models.rewrites.planted_faults import halves
from models.rewrites.split_conv import SideBySide
from models.rewrites.swap import swap_convs


class SecondDetached(SideBySide):
    """Two convs side by side, of which the second passes no gradient on to the input."""

    def read(self, x: Tensor, index: int) -> Tensor:
        """What part ``index`` sees of the input, cut off from the graph for the second."""
        seen = super().read(x, index)
        return seen.detach() if index == 1 else seen


def split_without_input_gradient(model: nn.Module, match: str | Iterable[str] | None = None) -> nn.Module:
    """Split convs in two along the output channels, in place; the second half gets no input gradient.

    The forward pass and the gradient of a rewritten conv's own weight are those of the right split; the
    gradient that reaches whatever comes before it lacks the second half's share.

    Args:
        match: which convs, as in ``swap_convs``; None for every conv with two output channels or more.

    Raises:
        RewriteError: for a conv with a single output channel.
    """
    return swap_convs(model, halves("split_without_input_gradient", SecondDetached), match)
