"""A call of torch on its way, which can be made again with another setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.nn.functional as F


@dataclass(frozen=True)
class Call:
    """A call of torch on its way, with its arguments by name where the function's are known."""

    function: Callable
    args: tuple
    kwargs: dict

    @property
    def name(self) -> str:
        """Without what marks a dunder, an operation in place or one from the right."""
        name = getattr(self.function, "__name__", "").strip("_")
        return _ALIASES.get(name, name)

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def given(self) -> dict[str, Any] | None:
        """Its arguments by name, defaults included; None of a function whose names nobody knows."""
        names = _signature(self.function)
        if names is None:
            return None
        try:
            bound = names.bind(*self.args, **self.kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return dict(bound.arguments)

    def again(self, **changed: Any) -> Any:
        return self.function(**{**(self.given() or {}), **changed})

    def number(self) -> tuple[int, float] | None:
        """Where the one number among a tensor's positional arguments stands, and what it is."""
        found = [(i, v) for i, v in enumerate(self.args) if type(v) in (int, float)]
        return found[0] if len(found) == 1 and len(self.args) == 2 else None

    def with_number(self, number: float) -> Any:
        place = (self.number() or (1, 0.0))[0]
        return self.function(*(number if i == place else v for i, v in enumerate(self.args)), **self.kwargs)


_ALIASES = {"radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "truediv": "div", "itruediv": "div"}


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """The arguments of ``scaled_dot_product_attention``, which is written in C++."""


@cache
def _signature(function: Callable) -> inspect.Signature | None:
    if function is F.scaled_dot_product_attention:
        return inspect.signature(_attention)
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # one of torch's own, written in C++
        return None
