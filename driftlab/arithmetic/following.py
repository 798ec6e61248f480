"""Do two networks still agree once each went down its own gradient?

A port may hold weights in a form in which nobody finds them: the two triangles of a factored matrix in one
square. If it trains them, it goes where the reference goes, since a step of gradient descent is the same in
any arrangement of the numbers; if it does not, it stays behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import distance
from driftlab.arithmetic.passes import CannotRunError, Recorded, run
from driftlab.arithmetic.quantities import read_both
from driftlab.network.pair import Pair

# By so much of their size the reference's weights are moved, together; of what that makes of its outputs the
# two may differ by so little, and no weight that is trained makes less.
MOVED, SHARE = 1e-3, 1e-6


def trains_alike(pair: Pair, whole: Recorded) -> bool:
    """After one step of gradient descent, in float64; no, where either does not run so."""
    both, options = (pair.reference, pair.candidate), {"seed": pair.seed, "evaluate": False}
    try:
        slopes = run(pair.reference, whole, "float64", **options).tensors["weight gradient"]
        rate = MOVED * _size(pair.reference.parameters()) / (_size(slopes.values()) or 1.0)

        def descent(network: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD((p for p in network.parameters() if p.requires_grad), rate)

        options |= {"outputs": pair.outputs, "optimizer": descent}
        own, other = read_both(both, whole, "float64", pair.comparable, **options)
    except CannotRunError:
        return False
    before, after, there = own["forward"], own["update"], other["update"]
    named = after.keys() & there.keys()
    moved, apart = (math.hypot(*(distance(after[n], of[n]) for n in named)) for of in (before, there))
    return bool(named) and apart <= SHARE * moved


def _size(tensors: Iterable[Tensor]) -> float:
    numbers = (t for t in tensors if t.is_floating_point() or t.is_complex())
    return math.hypot(*(float(torch.linalg.vector_norm(t.detach())) for t in numbers))
