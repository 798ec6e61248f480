"""A softmax and a choice in the other order: over the chosen ones, or over all, of which some are chosen.

Routers of experts weigh either all experts or those that they choose. A mask lies before a softmax or behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.mutant import TOGETHER, Mutant
from driftlab.mistakes.torch_call import Call

# What is added to hide a score is smaller.
_HIDDEN = -1e4


class Choices:
    """The softmaxes of what was chosen or hidden just before, and the choices of what a softmax gives."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, Call, Any]] = {}  # by the id of what it made, kept for that
        self._pairs: list[tuple[str, int, Call, int, Call]] = []

    def see(self, number: int, at: str, call: Call, out: Any) -> None:
        first, known = (out[0] if isinstance(out, tuple) else out), ()
        if call.name in ("softmax", "topk") and call.tensors:
            known = self._made.get(id(call.tensors[0]), ())
        if known and (call.name == "softmax") != (known[1].name == "softmax"):
            self._pairs.append((at, *known[:2], number, call))
        if call.name in ("softmax", "topk", "masked_fill") or _adds_a_mask(call):
            self._made[id(first)] = number, call, out

    def mutants(self) -> Iterator[Mutant]:
        """By the module in which the second of the two is called."""
        for at, before, first, number, then in self._pairs:
            words = f"`{first.name}` behind `{then.name}`, not before it"
            change = partial(_in_the_other_order, before, {})
            yield Mutant(at, words, TOGETHER, frozenset({before, number}), change)


def _adds_a_mask(call: Call) -> bool:
    return call.name == "add" and _mask_at(call) is not None


def _mask_at(call: Call) -> int | None:
    """Which of two operands hides something."""
    floating = [t.is_floating_point() and bool(t.numel()) for t in call.tensors]
    if len(floating) != 2 or not all(floating):
        return None
    return next((place for place in (1, 0) if bool((call.tensors[place] < _HIDDEN).any())), None)


def _in_the_other_order(before: int, kept: dict[str, Any], number: int, call: Call, *others: Any) -> Any:
    out = call.run()
    if number == before:
        kept["first"], kept["out"] = call, out
        return out
    first: Call = kept["first"]
    if call.name == "topk":  # the scores, not the weights; which are chosen stays
        scores = first.tensors[0].gather(call.argument(2, "dim", -1), out[1])
        return type(out)((first.with_tensor(0, scores).run(), out[1]))
    if first.name == "topk":
        weights = call.with_tensor(0, first.tensors[0]).run()
        return weights.gather(first.argument(2, "dim", -1), kept["out"][1])
    x, hidden = _unmasked(first)
    return torch.where(hidden, 0.0, call.with_tensor(0, x).run())


def _unmasked(call: Call) -> tuple[Tensor, Tensor]:
    if call.name == "masked_fill":
        return call.tensors[0], call.argument(1, "mask")
    place = _mask_at(call) or 0
    return call.tensors[1 - place], call.tensors[place] < _HIDDEN
