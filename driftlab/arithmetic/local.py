"""Pairs of modules, each fed what the reference's was given: do they differ by themselves?

A difference that arises in one module travels: downstream through the forward pass, upstream through the
gradients. So the reference is run once and what went into and came back to every module is kept; the
candidate's module gets the same. What differs then, arose there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.comparison import Comparison, compare
from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.passes import CannotRunError, Recorded, on_batch, run
from driftlab.arithmetic.quantities import used_outputs
from driftlab.arithmetic.recording import chosen, in_sequence, record
from driftlab.arithmetic.sizes import batch_of, without_ties
from driftlab.blame import unless_ours
from driftlab.fold import Fold
from driftlab.fold.layout import relative_distance
from driftlab.network.calling import tensors_in
from driftlab.network.modules import is_rewritten, only_holds
from driftlab.network.pair import Pair

# Inputs that differ by no more than what float32, or bfloat16 upstream, makes of them.
SAME_INPUTS = 1e-2
# Two float64 sums of the same gradients, shared otherwise among equal entries, agree to more than this.
SAME_SUM = 1e-9
# Where the whole network agrees on its whole batch, its modules are looked at on this many samples.
FEW_SAMPLES = 8
# All calls of a module are made anew where there are no more than these: the cost is theirs once more.
LONGEST_SEQUENCE = 32


@dataclass
class Local:
    """The pairs of modules of two networks, and what each was given in the reference's run.

    Attributes:
        made: reference name -> all its calls, in the order of execution.
        theirs: candidate name -> calls in the candidate's own run; None where it cannot be watched.
        counterparts: reference name -> candidate name.
        read: the fold of what can be compared; all of it where None.
        judged: the dtype in which the networks were handed over.
    """

    reference: nn.Module
    candidate: nn.Module
    fold: Fold
    counterparts: Mapping[str, str]
    made: Mapping[str, list[Recorded]]
    theirs: Mapping[str, list[Recorded]] | None
    seed: int = 0
    read: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    judged: str = "float32"

    def __post_init__(self) -> None:
        self.read = self.read or self.fold
        self.calls = {name: chosen(calls) for name, calls in self.made.items()}
        self._mine = dict(self.reference.named_modules())
        self._others = dict(self.candidate.named_modules())
        self._compared: dict[tuple[str, bool], list[Comparison]] = {}
        self._sequences: dict[str, Comparison | None] = {}

    def rewritten(self) -> list[str]:
        """The smallest pairs of modules that may compute differently, in the order of execution."""
        names = [n for n in self.calls if n in self.counterparts and is_rewritten(*self.pair(n))]
        return [n for n in names if not any(o != n and o.startswith(f"{n}.") for o in names)]

    def pair(self, name: str) -> tuple[nn.Module, nn.Module]:
        return self._mine[name], self._others[self.counterparts[name]]

    def prefixes(self, name: str) -> tuple[str, str]:
        """Of the names of their tensors within the two networks."""
        return name, self.counterparts[name]

    def aligned(self, name: str, within: float = SAME_INPUTS) -> bool:
        """Whether the candidate's module is given what the reference's is, in its own run.

        Behind a fault it is not; nor is it where a rewrite moved the borders, so that a pair of modules with
        the same tensors does not do the same work. The first wrong module is one that is given the right
        inputs.
        """
        if self.theirs is None:
            return True
        theirs = self.theirs.get(self.counterparts[name], [])
        return bool(theirs) and _same_inputs(self.calls[name][0], theirs[0], within)

    def permuted(self, name: str) -> bool:
        """Whether both give the same values in another order."""
        try:
            mine, theirs = self.pair(name)
            own = run(mine, self.calls[name][0], "float64", self.seed, False)
            other = run(theirs, self.calls[name][0], "float64", self.seed, False, beside=own)
        except CannotRunError:
            return False
        return _same_sorted(own.tensors["forward"], other.tensors["forward"])

    def reordered(self, name: str) -> bool:
        """Whether it gives its channels in another order because its weights are held in another order."""
        tensors = (n for n in self.fold.placed if n.startswith(f"{name}."))
        return any(map(self.fold.reorders, tensors)) and self.permuted(name)

    def comparisons(self, name: str, few: bool = True) -> list[Comparison]:
        """One a kept call, on a few samples or on all; empty where there is none that both can take."""
        if (name, few) not in self._compared:
            calls = [(few and batch_of(call, FEW_SAMPLES)) or call for call in self.calls.get(name, ())]
            self._compared[name, few] = [c for call in calls if (c := self._compare(name, call))]
        return self._compared[name, few]

    def wrong(self, name: str, few: bool = False) -> Difference | None:
        """The first pass in which this module differs by more than rounding, and not only at ties."""
        found = [d for c in self.comparisons(name, few) for d in c.wrong()]
        if not few and all(d.pass_ == "eval" for d in found):  # it follows training, and sees what is kept
            return self._wrong_in_sequence(name) or next(iter(found), None)
        if not found:
            return None
        if found[0].pass_ == "input gradient" and not self._lost(name) and not self._wrong_without_ties(name):
            return None
        return found[0]

    def agrees(self, name: str) -> bool:
        """Whether the two can be compared on a few samples, and are alike there but for rounding."""
        return bool(self.comparisons(name)) and self.wrong(name, few=True) is None

    def _wrong_in_sequence(self, name: str) -> Difference | None:
        """Of a module that is called several times and right in each: with what it keeps between them."""
        calls = self.made[name]
        if not 1 < len(calls) <= LONGEST_SEQUENCE:
            return None
        if name not in self._sequences:
            self._sequences[name] = self._compare(name, in_sequence(calls))
        found = self._sequences[name].wrong() if self._sequences[name] else []
        return found[0] if found and found[0].pass_ != "input gradient" else None

    def right(self, name: str, pass_: str = "forward") -> bool:
        """Whether it is known to be right by itself; nothing is known of what the candidate does not call.

        In eval mode with all that it gives, of which training may make no use.
        """
        paired = name in self.counterparts and bool(self.calls.get(name))
        if paired and self.theirs is not None and not self.theirs.get(self.counterparts[name]):
            return False
        right = paired and bool(self.comparisons(name)) and self.wrong(name) is None
        return right and not (pass_ == "eval" and self._gives_another(name))

    def _gives_another(self, name: str) -> bool:
        """Whether it is wrong in what no gradient came back to."""
        calls = [replace(c, gradients=dict.fromkeys(c.gradients)) for c in self.calls[name]]
        return any(c.wrong() for call in calls if (c := self._compare(name, call)))

    def _compare(self, name: str, call: Recorded) -> Comparison | None:
        mine, theirs = self.pair(name)
        if only_holds(theirs):
            return None
        try:
            options = {"prefixes": self.prefixes(name), "seed": self.seed, "judged": self.judged}
            found = compare(mine, theirs, call, self.read, **options)
        except CannotRunError:
            return None
        # what a gradient came back to, and the other does not return, cannot be sent to it
        return None if (used_outputs(call) or set()) & set(found.unpaired) else found

    def _lost(self, name: str) -> bool:
        """Whether another sum of gradients comes back: equal entries share one, and lose nothing of it.

        What ReLU sends back at exact zeros is no share of anything.
        """
        for call in self.calls[name]:
            try:
                both = [run(m, call, "float64", self.seed, False) for m in self.pair(name)]
            except CannotRunError:
                return False
            own, other = (p.tensors["input gradient"] for p in both)
            for key, tensor in own.items():
                margin = SAME_SUM * float(tensor.abs().sum())
                if key in other and not abs(float(tensor.sum() - other[key].sum())) <= margin:
                    return True
        return False

    def _wrong_without_ties(self, name: str) -> bool:
        """Where the largest entries of a window are equal, either may get the gradient. Noise breaks ties."""
        found = [self._compare(name, without_ties(call)) for call in self.calls[name]]
        return any(c.wrong() for c in found if c)


def local_calls(pair: Pair, batch: tuple[object, object]) -> Local:
    """Every pair of modules, with what the reference's module is given on this batch."""
    calls = record(pair.reference, on_batch(pair, batch), pair.seed)
    theirs = None
    with unless_ours():  # code may take no hooks (vmap)
        theirs = record(pair.candidate, on_batch(pair, batch), pair.seed)
    both = pair.reference, pair.candidate, pair.fold, pair.counterparts
    return Local(*both, calls, theirs, pair.seed, pair.comparable, pair.judged)


def _same_sorted(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    pairs = [(t.flatten().sort().values, theirs.get(n)) for n, t in mine.items()]
    return bool(pairs) and all(
        other is not None
        and other.numel() == own.numel()
        and torch.allclose(own, other.flatten().sort().values, rtol=1e-9, atol=1e-12)
        for own, other in pairs
    )


def _same_inputs(mine: Recorded, theirs: Recorded, within: float) -> bool:
    """Float32 rounding apart; kinks on the way may make a few entries differ by more."""
    own, other = (
        [t for t in tensors_in((c.args, c.kwargs)) if t.is_floating_point()] for c in (mine, theirs)
    )
    if [t.shape for t in own] != [t.shape for t in other]:
        return False
    return all(
        float(relative_distance(b.detach().double(), a.detach().double())) < within
        for a, b in zip(own, other, strict=True)
    )
