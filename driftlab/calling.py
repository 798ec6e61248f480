"""How a network takes its batch: a tensor, a tuple of arguments, or a dict of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor, nn

Call = Callable[[nn.Module, object], object]


def whole(module: nn.Module, inputs: object) -> object:
    return module(inputs)


def unpacked(module: nn.Module, inputs: object) -> object:
    return module(*inputs)


def by_keyword(module: nn.Module, inputs: Mapping) -> object:
    return module(**inputs)


def calling(module: nn.Module, inputs: object) -> Call:
    """How ``module`` is to be called on ``inputs``, by the signature of its ``forward``.

    A tensor is handed over as it is. A dict becomes keywords where ``forward`` has parameters of those
    names, a tuple or list becomes arguments where ``forward`` takes that many; else each is handed over
    whole.
    """
    if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping | tuple | list):
        return whole
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # no Python function: a compiled module
        return by_keyword if isinstance(inputs, Mapping) else unpacked
    kinds = {p.kind for p in parameters}
    if isinstance(inputs, Mapping):
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        fits = set(inputs) <= named or inspect.Parameter.VAR_KEYWORD in kinds
        return by_keyword if fits else whole
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return unpacked if len(positional) >= len(inputs) or inspect.Parameter.VAR_POSITIONAL in kinds else whole
