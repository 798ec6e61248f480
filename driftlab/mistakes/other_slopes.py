"""Activations with another slope than their own, as of a way back by hand, or of a gate that is detached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from driftlab.mistakes.alterations import FORMS, form
from driftlab.mistakes.call_modes import InPlaces, Place
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.scopes import Scopes

# Of the form x * gate(x).
_GATED = ("silu", "gelu", "mish")
_TINY = 1e-30

# What has the slope; None of a call that it does not concern.
_Slope = Callable[[Call], Tensor | None]


class OtherSlopes(InPlaces):
    """Activations have another slope on the way back there."""

    def __init__(self, slope: _Slope, now: Scopes, changed: frozenset[Place] = frozenset()):
        super().__init__(now, changed)
        self._slope = slope

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        active = form(call) is not None or call.name in _GATED
        sloped = self._slope(call) if active and call.argument(0, "input").requires_grad else None
        if sloped is None or not self.changes():
            return call.run()
        return sloped + (call.run() - sloped).detach()


def slopes() -> Iterator[tuple[str, _Slope]]:
    """Each in words."""
    yield "a gate that is detached", _held_gate
    yield "a gradient that goes straight through", lambda call: call.argument(0, "input")
    for words, other in FORMS.items():
        yield f"the slope of {words}", partial(_of_form, words, other)


def _of_form(words: str, other: Callable[[Tensor], Tensor], call: Call) -> Tensor | None:
    return None if form(call) == words else other(call.argument(0, "input"))


def _held_gate(call: Call) -> Tensor | None:
    """x * gate(x), with a gate that is a constant on the way back."""
    if call.name not in _GATED:
        return None
    x = call.argument(0, "input")
    near = torch.where(x == 0, _TINY, x.detach())
    return x * (call.with_tensor(0, near).run() / near)
