"""Mistakes in what a call is given: an operand left out, negated, turned, or another value in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.alterations import FORMS, weighted
from driftlab.mistakes.orders import MOVES, Mutation, turnings
from driftlab.mistakes.taken_parts import cut_elsewhere
from driftlab.mistakes.torch_call import Call

# An operand may be one of so many values of its shape, of those that were made before it the latest.
OTHERS = 16
_BOTH_WAYS = ("add", "mul", "maximum", "minimum")
_SUMS = ("add", "sub", "rsub", "lerp", "addcmul", "addmm", "baddbmm")


def _terms(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """An operand that is nothing, or has the other sign."""
    for place, tensor in enumerate(call.tensors):
        if tensor.is_floating_point():
            yield with_operand(call, place, "negated", -tensor)
            if len(call.tensors) > 1:
                yield with_operand(call, place, "left out", torch.zeros_like(tensor))


def _turned(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """An operand in another order."""
    for place, tensor in enumerate(call.tensors):
        for words, turned in turnings(tensor) if tensor.is_floating_point() else ():
            yield with_operand(call, place, words, turned)


def _exchanged(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Two operands each in the other's place."""
    for (i, one), (j, other) in combinations(enumerate(call.tensors), 2):
        floating = one.is_floating_point() and other.is_floating_point()
        if floating and one.shape == other.shape and call.name not in _BOTH_WAYS:
            words = f"operands {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, call.with_tensor(i, other).with_tensor(j, one).run


def _neutral(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A term of a sum that is nothing, a factor that is one."""
    own = {"mul": (0, 1), "div": (1,)}.get(call.name, range(3) if call.name in _SUMS else ())
    made, word = (torch.zeros_like, "left out") if call.name in _SUMS else (torch.ones_like, "taken as one")
    for place, tensor in enumerate(call.tensors):
        if place in own and tensor.is_floating_point():
            yield with_operand(call, place, word, made(tensor))


def last_alike(tensor: Tensor, earlier: Sequence[Tensor]) -> list[int]:
    """Where the last others of its shape stand among those that were made before, from the last one back."""
    alike = [at for at, t in enumerate(earlier) if t.shape == tensor.shape and t is not tensor]
    return alike[: -OTHERS - 1 : -1]


@dataclass(frozen=True)
class Given:
    """The call with something else for one of its operands."""

    call: Call
    place: int
    value: Tensor

    def __call__(self) -> Any:
        return self.changed.run()

    @property
    def changed(self) -> Call:
        return self.call.with_tensor(self.place, self.value)

    @property
    def own(self) -> Tensor:
        """What stands there."""
        return self.call.tensors[self.place]


class Another(Given):
    """With another value, of those that were made before."""


def _others(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another value for an operand."""
    for place, tensor in enumerate(call.tensors):
        for at in last_alike(tensor, earlier) if tensor.is_floating_point() else ():
            words = f"{_which(call, place)} `{call.name}` that is another value"
            yield words, Another(call, place, earlier[at])


def _moved(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another value that is only moved: of all that its takers are given the first."""
    if call.name in MOVES:
        yield from _others(call, earlier)


def _activated(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """What a layer with a weight is given, or what it gives, through one more activation."""
    if weighted(call) is None:
        return
    for words in ("ReLU", "SiLU", "gelu"):
        yield with_operand(call, 0, f"through {words}", FORMS[words](call.tensors[0]))
        yield f"the result of `{call.name}` through {words}", lambda form=FORMS[words]: form(call.run())


def _normed_alone(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of a sum that is normed one term alone is, and the other added to that."""
    if not call.name.endswith("_norm") or not call.tensors:
        return
    x = call.tensors[0]
    for one, other in permutations([earlier[at] for at in last_alike(x, earlier)], 2):
        if torch.equal(one + other, x):
            words = f"a residual that `{call.name}` does not norm"
            yield words, lambda one=one, other=other: one + call.with_tensor(0, other).run()


def with_operand(call: Call, place: int, words: str, tensor: Tensor) -> Mutation:
    return f"{_which(call, place)} `{call.name}` {words}", Given(call, place, tensor)


def _which(call: Call, place: int) -> str:
    return f"operand {place + 1} of" if len(call.tensors) > 1 else "the operand of"


ACTIVATED, TURNED = _activated, _turned
OPERANDS = (_exchanged, _terms, _turned, _others, _normed_alone, _activated, cut_elsewhere)
NEUTRAL, MOVED = (_neutral,), (_moved,)
