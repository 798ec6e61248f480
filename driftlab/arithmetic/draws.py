"""Random numbers as a narrower dtype draws them: from the same state of a generator float64 draws others.

A float64 network that is compared with a float32 one needs its dropout masks and its noise. So what draws
runs in the narrow dtype and what it drew is widened; what is computed with it is computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from driftlab.network.calling import random_state, tensors_in
from driftlab.network.compiled import DispatchMode

_aten = torch.ops.aten


def _overloads(*names: str) -> set[Callable]:
    packets = [getattr(_aten, name) for name in names]
    return {getattr(packet, o) for packet in packets for o in packet.overloads() if "out" not in o}


# They draw and compute nothing: of a probability or a rate that is a tensor, rounding makes at most, and
# seldom, another integer.
_ALONE = _overloads(
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "random", "random_"),
    *("uniform", "uniform_", "normal_", "normal_functional", "exponential", "exponential_", "log_normal"),
    *("log_normal_", "cauchy", "cauchy_", "geometric", "geometric_", "bernoulli", "bernoulli_", "binomial"),
    *("multinomial", "poisson"),
) | {_aten.normal.float_float}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)`` as it may be called from where operations are dispatched."""
    return _aten._to_copy.default(tensor, dtype=dtype)


def _dropout(func: Callable, dtype: torch.dtype, x: Tensor, p: float, train: bool | None) -> tuple:
    """What ``F.dropout`` is on a GPU."""
    if train is False:
        return func(x, p, train)
    mask = func(torch.ones_like(x, dtype=dtype), p, train)[1]
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _rrelu(
    func: Callable,
    dtype: torch.dtype,
    x: Tensor,
    noise: Tensor,
    low=1 / 8,
    high=1 / 3,
    training=False,
    generator=None,
) -> Tensor:
    options = low, high, training, generator
    if not training:
        return func(x, noise, *options)
    slopes = torch.ones_like(noise, dtype=dtype)
    _aten.rrelu_with_noise(_cast(x, dtype), slopes, *options)
    noise.copy_(slopes)
    return x.mul_(noise) if func is _aten.rrelu_with_noise_.default else x * noise


def _normal(func: Callable, dtype: torch.dtype, mean, std=1.0, *, generator=None) -> Tensor:
    like = mean + torch.zeros_like(std) if isinstance(std, Tensor) else mean
    return mean + std * torch.empty_like(like, dtype=dtype).normal_(generator=generator)


# They draw and compute: only the drawing is narrow.
_WITHIN: dict[Callable, Callable] = {
    _aten.native_dropout.default: _dropout,
    _aten.rrelu_with_noise.default: _rrelu,
    _aten.rrelu_with_noise_.default: _rrelu,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_Tensor: _normal,
}
# Left as they are: gamma and Dirichlet, which draw alike in every dtype; fused attention and cuDNN's
# recurrent layers, which draw where nobody can reach.
DRAWING = _ALONE | _WITHIN.keys()


def drawn(func: Callable, args: tuple, kwargs: dict, dtype: torch.dtype) -> object:
    """``func``, one of ``DRAWING``, of float64 tensors: it draws as ``dtype`` does, and gives float64."""
    if func in _WITHIN:
        return _WITHIN[func](func, dtype, *args, **kwargs)

    def narrowed(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.dtype is torch.float64:
            return _cast(leaf, dtype)
        return dtype if leaf is torch.float64 else leaf

    own, named = pytree.tree_map(narrowed, (args, kwargs))
    out = func(*own, **named)
    if func._schema.is_mutable:
        return args[0].copy_(out)
    return _cast(out, torch.float64) if out.is_floating_point() else out


class Float32Draws(DispatchMode):
    """What draws in float64 draws as float32 does; ``drew`` says whether anything did."""

    supports_higher_order_operators = True
    drew = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled, and draws as its compiler has it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in DRAWING or not _gives_float64(args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        return drawn(func, args, kwargs, torch.float32)


def _gives_float64(args: tuple, kwargs: dict) -> bool:
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"] is torch.float64
    return any(t.dtype is torch.float64 for t in tensors_in((args, kwargs)))


class Draws:
    """The same for a network that runs again and again: one that draws nothing is not slowed down.

    It is watched the first time, and from when on it has drawn. One that begins to draw later has done so in
    float64 that once.
    """

    def __init__(self) -> None:
        self._drew: bool | None = None

    @contextmanager
    def as_float32(self) -> Iterator[None]:
        if self._drew is False:
            before = random_state()
            yield
            self._drew = random_state() != before
        else:
            with Float32Draws() as mode:
                yield
            self._drew = self._drew or mode.drew
