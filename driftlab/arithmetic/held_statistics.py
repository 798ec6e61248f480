"""Norms through whose statistics no gradient goes back, as where they are computed without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from driftlab.arithmetic.flow import Scopes
from driftlab.arithmetic.torch_call import Call


class HeldStatistics(TorchFunctionMode):
    """In the modules ``held`` the statistics of norms are taken for constants.

    Attributes:
        scopes: the modules that norm, in their order.
    """

    def __init__(self, now: Scopes, held: frozenset[str] = frozenset()):
        super().__init__()
        self._now, self._held = now, held
        self.scopes: dict[str, None] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        slope = _SLOPES.get(call.name)
        given = call.given() if slope is not None else None
        if given is None or not given["input"].requires_grad or (rate := slope(given)) is None:
            return call.run()
        self.scopes[self._now.now] = None
        if self._now.now not in self._held:
            return call.run()
        x = given["input"]
        weight = 1.0 if given.get("weight") is None else _as_channels(given["weight"], x, call.name)
        return call.again(input=x.detach()) + (x - x.detach()) * (rate * weight).detach()


def _as_channels(weight: Tensor, x: Tensor, name: str) -> Tensor:
    return weight if name in ("layer_norm", "rms_norm") else weight.reshape(-1, *[1] * (x.dim() - 2))


def _inverse_root(x: Tensor, dims: list[int], eps: float) -> Tensor:
    return (x.var(dims, correction=0, keepdim=True) + eps).rsqrt()


def _of_batch(given: dict) -> Tensor | None:
    x = given["input"]
    return _inverse_root(x, [0, *range(2, x.dim())], given["eps"]) if given["training"] else None


def _of_instance(given: dict) -> Tensor | None:
    x = given["input"]
    return _inverse_root(x, [*range(2, x.dim())], given["eps"]) if given["use_input_stats"] else None


def _of_group(given: dict) -> Tensor:
    parts = given["input"].unflatten(1, (given["num_groups"], -1))
    rate = _inverse_root(parts, [*range(2, parts.dim())], given["eps"])
    return rate.expand_as(parts).reshape(given["input"].shape)


def _of_layer(given: dict) -> Tensor:
    return _inverse_root(given["input"], _last(given["normalized_shape"]), given["eps"])


def _of_root(given: dict) -> Tensor:
    x = given["input"]
    eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
    return (x.square().mean(_last(given["normalized_shape"]), keepdim=True) + eps).rsqrt()


def _last(shape: tuple[int, ...]) -> list[int]:
    return [*range(-len(shape), 0)]


# By how much a result moves with what is normed, where the statistics stay.
_SLOPES: dict[str, Callable[[dict], Tensor | None]] = {
    "batch_norm": _of_batch,
    "instance_norm": _of_instance,
    "group_norm": _of_group,
    "layer_norm": _of_layer,
    "rms_norm": _of_root,
}
