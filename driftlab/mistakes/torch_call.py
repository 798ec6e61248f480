"""A call of torch on its way, which can be made again with another setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# Of two values either may be the one that the other is spread over.
_SPREAD = ("mul", "add")
# Attributes of a tensor that are a call of it.
TRANSPOSED = ("T", "mT", "H", "mH")


@dataclass(frozen=True)
class Call:
    """A call of torch on its way, with its arguments by name where the function's are known."""

    function: Callable
    args: tuple
    kwargs: dict

    @property
    def name(self) -> str:
        """Without what marks a dunder, an operation in place or one from the right; of ``x.mT`` that."""
        name = getattr(self.function, "__name__", "")
        if name == "__get__":
            return getattr(self.function.__self__, "__name__", "get")
        name = name.strip("_")
        return _ALIASES.get(name, name)

    @property
    def writes(self) -> bool:
        """Whether it sets something, or writes into what it is given; or reads no value (``x.shape``)."""
        name = getattr(self.function, "__name__", "")
        if name == "__get__":
            return self.name not in TRANSPOSED
        if name.startswith("__"):
            return name in ("__set__", "__setitem__") or name.startswith("__i")
        return name.endswith("_") or "out" in self.kwargs

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

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def with_argument(self, place: int, name: str, value: Any) -> Any:
        if len(self.args) > place:
            return self.function(*self.args[:place], value, *self.args[place + 1 :], **self.kwargs)
        return self.function(*self.args, **{**self.kwargs, name: value})

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All that it is given, also in lists, in their order."""
        found: list[Tensor] = []
        self.with_tensors(lambda place, tensor: found.append(tensor))
        return found

    @property
    def goes_on_with(self) -> int | None:
        """Which of them it makes another of: of ``where(mask, x, y)`` the larger one; None of integers.

        Of a weight and another value that one; so of a gate and what it is spread over.
        """
        place = 0
        smaller = len(self.tensors) == 2 and self.tensors[0].numel() < self.tensors[1].numel()
        if self.name == "where" and len(self.tensors) == 3:
            place = 1 if self.tensors[1].numel() > self.tensors[2].numel() else 2
        elif len(self.tensors) == 2 and (
            isinstance(self.tensors[0], nn.Parameter) or (smaller and self.name in _SPREAD)
        ):
            place = 1
        floating = len(self.tensors) > place and self.tensors[place].is_floating_point()
        return place if floating else None

    def with_tensor(self, place: int, tensor: Tensor) -> Call:
        """With another one of ``tensors``."""
        return self.with_tensors(lambda at, own: tensor if at == place else own)

    def with_tensors(self, change: Callable[[int, Tensor], Any]) -> Call:
        """With what ``change(place, tensor)`` makes of each."""
        places = count()

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(next(places), value)
            if type(value) in (list, tuple):
                return type(value)([changed(v) for v in value])
            return {k: changed(v) for k, v in value.items()} if type(value) is dict else value

        return Call(self.function, changed(self.args), changed(self.kwargs))

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
