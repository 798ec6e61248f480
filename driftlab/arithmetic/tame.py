"""Where a function can be told of a network that is chaotic on its own inputs.

Chaos takes its time: along a shorter sequence rounding has not grown yet, and with smaller weights it does
not grow at all. On the first inputs of the network's own sequence, with its own weights, another function
shows; with smaller weights one shows that sets in further on. Equal on both, the two are the same function as
far as anybody can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from driftlab.arithmetic.comparison import Comparison, compare
from driftlab.arithmetic.passes import CannotRunError, Recorded, run
from driftlab.fold import FoldError
from driftlab.fold.unfold import put_weights_or_fold
from driftlab.network.calling import copied, each_tensor, tensors_in
from driftlab.network.pair import Pair

# Where the sequence may lie: behind the batch, before it, behind a channel.
DIMENSIONS = (1, 0, 2)
SHORTEST = 2
# A gain of eight is a common one's eightfold; a sixty-fourth of it grows nothing.
SHARES = tuple(2.0**-k for k in range(1, 7))


@dataclass(frozen=True)
class Told:
    """A comparison that tells something, and of what."""

    of: str
    comparison: Comparison


def on_shorter_inputs(pair: Pair, whole: Recorded) -> Told | None:
    """The longest beginning of the inputs, by quarters, on which the control is not saturated."""
    for of, call in _shorter(pair, whole):
        if found := _told(pair, call):
            return Told(of, found)
    return None


def with_smaller_weights(pair: Pair, whole: Recorded) -> Told | None:
    """The largest share of all weights, by halves, with which the control is not saturated."""
    for share in SHARES:
        mine, theirs = copied(pair.reference), copied(pair.candidate)
        try:
            put_weights_or_fold(mine, theirs, pair.fold, lambda _, tensor, share=share: tensor * share)
        except FoldError:
            return None
        if found := _told(replace(pair, reference=mine, candidate=theirs), whole):
            return Told(f"with weights {1 / share:.0f} times as small", found)
    return None


def _told(pair: Pair, call: Recorded) -> Comparison | None:
    try:
        found = compare(pair.reference, pair.candidate, call, pair.comparable, seed=pair.seed)
    except CannotRunError:
        return None
    return None if found.untold() else found


def _shorter(pair: Pair, whole: Recorded) -> Iterator[tuple[str, Recorded]]:
    for dim in DIMENSIONS:
        lengths = {t.shape[dim] for t in tensors_in(whole.args) if t.dim() > dim}
        longest = max(lengths, default=0)
        length = longest // 4
        while length >= SHORTEST:
            call = _with_gradients(pair, _cut(whole, dim, longest, length))
            if call is None:
                break
            yield f"on the first {length} of {longest} along dimension {dim} of the inputs", call
            length //= 4


def _cut(whole: Recorded, dim: int, longest: int, length: int) -> Recorded:
    def cut(tensor: Tensor) -> Tensor:
        fits = tensor.dim() > dim and tensor.shape[dim] == longest
        part = tensor.detach().narrow(dim, 0, length).clone() if fits else tensor
        return part.requires_grad_(tensor.requires_grad) if fits and tensor.requires_grad else part

    args, kwargs = each_tensor(cut, (whole.args, whole.kwargs))
    return replace(whole, args=args, kwargs=kwargs, loss=None)


def _with_gradients(pair: Pair, call: Recorded) -> Recorded | None:
    """Random numbers are sent back, since the targets are those of the whole inputs."""
    try:
        outputs = run(pair.reference, call, "float32", pair.seed, evaluate=False).tensors["forward"]
    except CannotRunError:
        return None
    generator = torch.Generator().manual_seed(pair.seed)
    given = {n: torch.randn(t.shape, generator=generator).to(t.device) for n, t in outputs.items()}
    return replace(call, gradients=given)
