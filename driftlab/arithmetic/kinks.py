"""Sign flips: which side of a kink each pre-activation lies on, and where two arms disagree.

A ReLU passes a pre-activation or drops it, a max-pool passes one of its window. Between kinks a network
is smooth and rounding errors grow slowly; where a pre-activation of one arm crosses a kink that the
other's does not, the gradient jumps. The sides are read from what autograd has saved for the backward
pass, so modules and functions are seen alike and the forward pass costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

# The backward nodes of ReLU and its like: what they saved, the pre-activations or the output of a ReLU,
# and where the kink lies (a number, or the name under which it was saved; None for the output).
_SIGNS = {
    "ReluBackward0": ("_saved_result", None),
    "LeakyReluBackward0": ("_saved_self", 0),
    "PreluKernelBackward0": ("_saved_self", 0),
    "ThresholdBackward0": ("_saved_self", "_saved_threshold"),
    "HardtanhBackward0": ("_saved_self", "_saved_min_val"),  # also ReLU6
}
# Those of max-pool, with the winners that they saved; the one-dimensional is made of the two-dimensional.
_WINNERS = {
    "MaxPool2DWithIndicesBackward0": "_saved_result1",
    "MaxPool3DWithIndicesBackward0": "_saved_result1",
    "AdaptiveMaxPool2DBackward0": "_saved_result1",
    "AdaptiveMaxPool3DBackward0": "_saved_result1",
}


@dataclass(frozen=True)
class KinkSides:
    """The sides taken in one forward pass.

    Attributes:
        shapes: of the kinked tensors, in the order of the forward pass, ReLU-like ones first.
        signs: bool, one entry a pre-activation, True where it is positive; padded with False to whole
            words of eight.
        winners: a tensor for each max-pool, the index of the winner in each window.
    """

    shapes: tuple[torch.Size, ...]
    signs: Tensor
    winners: tuple[Tensor, ...]


@torch.no_grad()
def kink_sides(loss: Tensor, reuse: KinkSides | None = None) -> KinkSides:
    """The sides taken on the way to ``loss``; ``reuse`` gives up its memory for them where it fits.

    To be called before ``loss.backward()``, which frees what is read here. Calls that no gradient passes
    through, or that are hidden in a compiled graph, are not seen.
    """
    named = ((node, node.name()) for node in nodes(loss.grad_fn))
    kinked = [(node, name) for node, name in named if name in _SIGNS or name in _WINNERS]
    kinked.sort(key=lambda named: named[0]._sequence_nr())
    saved = [(getattr(n, _SIGNS[name][0]), _threshold(n, name)) for n, name in kinked if name in _SIGNS]
    winners = tuple(getattr(n, _WINNERS[name]) for n, name in kinked if name in _WINNERS)
    shapes = tuple(t.shape for t, _ in saved) + tuple(w.shape for w in winners)
    sizes = [t.numel() for t, _ in saved]
    if reuse is not None and reuse.shapes == shapes:
        signs = reuse.signs
    else:
        signs = torch.zeros(math.ceil(sum(sizes) / 8) * 8, dtype=torch.bool, device=loss.device)
    for part, (tensor, threshold) in zip(signs[: sum(sizes)].split(sizes), saved, strict=True):
        if threshold is None:
            part.view(tensor.shape).copy_(tensor)  # not 0, so positive: three times as fast as a comparison
        else:
            torch.gt(tensor, threshold, out=part.view(tensor.shape))
    return KinkSides(shapes, signs, winners)


def _threshold(node: Node, name: str) -> float | None:
    """The value above which a pre-activation passes; None where what was saved is the output of a ReLU."""
    threshold = _SIGNS[name][1]
    return getattr(node, threshold) if isinstance(threshold, str) else threshold


def nodes(root: Node | None) -> Iterator[Node]:
    """The backward nodes of a graph, each once."""
    seen, waiting = {root, None}, [root] if root is not None else []
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                waiting.append(below)


def sign_flips(sides: KinkSides, against: KinkSides) -> Tensor | None:
    """How many pre-activations lie on different sides: a float64 scalar on their device.

    None where the two cannot be paired, because a rewrite changed the number or shapes of the kinks.
    """
    if sides.shapes != against.shapes:
        return None
    # Eight bools are read as one word: xor leaves a set bit for each that differs, and the product adds
    # the eight up in the top byte. A third of the time of comparing and summing them one by one.
    words = sides.signs.view(torch.int64) ^ against.signs.view(torch.int64)
    flips = words.mul_(0x0101010101010101).bitwise_right_shift_(56).sum()
    moved = [(a != b).sum() for a, b in zip(sides.winners, against.winners, strict=True)]
    return torch.stack([flips, *moved]).sum().double()
