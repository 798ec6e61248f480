"""The integer probe: small integers make every partial sum exact, so a right rewrite matches bit for bit.

Inputs, weights and output gradients are small odd and even integers; forward, input gradient and weight
gradient are compared in float32 at several sizes. Whether the probe applies is not assumed but seen: the
reference must give the same bits in float32 and in float64. Algorithms with constants that are no binary
fractions (Winograd F(4x4), FFT) are not exact, honestly so: their error lies within rounding, and
``comparison`` decides.

The same with ever wider integers in one operand, and single ones in the other, measures how many bits of its
operands a kernel keeps: 24 in float32, 11 in float16 and TF32, 8 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import same_values
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.arithmetic.sizes import with_gradients
from driftlab.fold.unfold import put_weights
from driftlab.network.calling import copied, each_tensor

EXACT_PASSES = ("forward", "input gradient", "weight gradient")
WIDEST = 20  # bits asked of an operand; a product with a single one stays exact up to 24


class IntegerPair:
    """Both modules with integer weights, and integer inputs in the shapes of a recorded call."""

    def __init__(
        self, mine: nn.Module, theirs: nn.Module, fold: Callable, prefixes: tuple[str, str], seed: int = 0
    ):
        self.mine, self.theirs = copied(mine), copied(theirs)
        self.fold, self.prefixes = fold, prefixes
        self.generator = torch.Generator().manual_seed(seed)

    def small(self, shape: torch.Size) -> Tensor:
        return torch.randint(-3, 4, shape, generator=self.generator).double()

    def set_weights(self, make: Callable[[torch.Size], Tensor]) -> None:
        """Raises FoldError where some weight of one has no place in the other."""
        put_weights(
            self.mine, self.theirs, self.fold, lambda name, t: make(t.shape).to(t.device), self.prefixes
        )

    def inputs(self, call: Recorded, make: Callable[[torch.Size], Tensor]) -> Recorded:
        def integers(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return make(tensor.shape).to(tensor).requires_grad_(tensor.requires_grad)

        args, kwargs = each_tensor(integers, (call.args, call.kwargs))
        return with_gradients(self.mine, replace(call, args=args, kwargs=kwargs), lambda t: make(t.shape))

    def exactness(self, call: Recorded, passes: tuple[str, ...] = EXACT_PASSES) -> tuple[str, ...] | None:
        """The passes in which the candidate's integers are not the reference's.

        None where the reference itself is not exact, or does not run on this call.
        """
        try:
            truth = run(self.mine, call, "float64", evaluate=False)
            own = run(self.mine, call, "float32", evaluate=False)
        except CannotRunError:
            return None
        if self._inexact(own, truth, passes, theirs=False):
            return None
        other = run(self.theirs, call, "float32", evaluate=False, beside=own)
        return self._inexact(other, truth, passes, theirs=True)

    def _inexact(
        self, out: Passes, truth: Passes, passes: tuple[str, ...], *, theirs: bool
    ) -> tuple[str, ...]:
        return tuple(p for p in passes if not self._same(out, truth, p, theirs))

    def _same(self, passes: Passes, truth: Passes, pass_: str, theirs: bool) -> bool:
        mine, other = truth.tensors[pass_], passes.tensors[pass_]
        if theirs and pass_ == "weight gradient":
            prefix = [f"{p}." if p else "" for p in self.prefixes]
            folded = self.fold({prefix[1] + n: t for n, t in other.items()})
            other = {n.removeprefix(prefix[0]): t for n, t in folded.items()}
        finite = all(bool(t.isfinite().all()) for t in mine.values())
        return finite and all(n in other and same_values(t, other[n]) for n, t in mine.items())


def operand_bits(pair: IntegerPair, call: Recorded) -> int:
    """The most bits that an odd integer in one operand may have and still come out of the candidate exactly.

    Each operand (inputs, weights) is the wide one in turn, the other holds few ones; the smaller number
    counts: 0 where the reference is not exact either.
    """
    found = []
    for wide in ("inputs", "weights"):
        exact = [k for k in range(1, WIDEST + 1) if _exact_at(pair, call, k, wide)]
        found.append(next(k - 1 for k in range(1, WIDEST + 2) if k not in exact))
    return min(found)


def _exact_at(pair: IntegerPair, call: Recorded, bits: int, wide: str) -> bool:
    def odd(shape: torch.Size) -> Tensor:
        sign = 2 * torch.randint(0, 2, shape, generator=pair.generator) - 1
        top = torch.randint(2 ** (bits - 1), 2**bits, shape, generator=pair.generator)
        return (sign * (top | 1)).double()

    def sparse(shape: torch.Size) -> Tensor:
        """One 1 or -1 among the entries that a sum runs over, so that nothing is added up."""
        rows = shape[0] if len(shape) > 1 else 1
        out = torch.zeros(shape, dtype=torch.float64).reshape(rows, -1)
        if len(shape) > 1:
            column = torch.randint(0, out.shape[1], (rows, 1), generator=pair.generator)
            out.scatter_(1, column, 1.0)
        return out.view(shape)

    pair.set_weights(odd if wide == "weights" else sparse)
    inputs = pair.inputs(call, odd if wide == "inputs" else sparse)
    return pair.exactness(inputs, ("forward",)) == ()  # the gradients are sums of wide products
