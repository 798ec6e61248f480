"""Cases that change one method of one block in a network that is rewritten rightly besides."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bench.case import Names, case
from bench.cases._heldout_rewritten_sequence import (
    HandLSTM,
    PackedEncoder,
    PackedLayer,
    StackedMixture,
    by_hand,
    stacked,
)
from bench.cases._heldout_rewritten_vision import PixelBlock, PixelMobileNet, SplitBlock, SplitPreActNet
from bench.tasks import Task

OF_BLOCKS = {SplitBlock: SplitPreActNet, PixelBlock: PixelMobileNet, PackedLayer: PackedEncoder}
OF_ONE = {StackedMixture: stacked, HandLSTM: by_hand}


def inside(
    kind: type[nn.Module], method: str, at: Names, what: str, on: Task, block: int = 0, label="bug", **truth
) -> Callable:
    """Register the decorated function as a case: a method of ``kind``, in the network that is made of it.

    Args:
        at: the right place, as the reference calls it.
        what: kind of fault.
        block: which of the rewritten blocks has it.
    """

    def register(function: Callable) -> Callable:
        def rewrite(model: nn.Module) -> nn.Module:
            changed = type(kind.__name__, (kind,), {method: function})
            if kind in OF_ONE:
                return OF_ONE[kind](model, changed)
            return OF_BLOCKS[kind](model, {block: changed})

        rewrite.__name__, rewrite.__module__ = function.__name__, function.__module__
        return case(label, what, on, module=at, **truth)(rewrite)

    return register
