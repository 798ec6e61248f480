"""A convolution with another dilation, or its kernel the other way: with a result of the size that it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

# Tried of every convolution, besides half and twice its own, as the layers before and behind it mostly have.
RATES = (1, 2, 3, 4, 8)
# Where convolutions take it, by place.
PLACES = {"stride": 3, "padding": 4, "dilation": 5}


def dilated(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """By one that is common, half or twice its own: as where it is forgotten, or is another layer's.

    The padding follows. What is padded before the call is so on both sides, or on the left alone.
    """
    own = _own(call)
    if own is None:
        return
    for rate in sorted({*RATES, own // 2, 2 * own} - {0, own}):
        words = f"a dilation of {rate}"
        yield words, lambda rate=rate: _padded_within(call, own, rate)
        if not any(_each(call, "padding", 0)):
            yield words, lambda rate=rate: _padded_before(call, own, rate, sides=2)
            yield words, lambda rate=rate: _padded_before(call, own, rate, sides=1)


def turned_kernel(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of a convolution over rows and columns, with these exchanged: a kernel of 1 by 7 that runs down."""
    if (
        call.name == "conv2d"
        and max(_kernel(call)) > 1
        and not isinstance(call.argument(4, "padding", 0), str)
    ):
        settings = {name: _each(call, name, int(name != "padding"))[::-1] for name in PLACES}
        weight = call.argument(1, "weight").transpose(2, 3)
        given = {"bias": call.argument(2, "bias"), "groups": call.argument(6, "groups", 1)} | settings
        words = "a kernel with rows and columns exchanged"
        yield words, lambda: call.function(call.argument(0, "input"), weight, **given)


def _own(call: Call) -> int | None:
    """Its dilation, the same along all axes; None of a call that has none."""
    if call.name not in ("conv1d", "conv2d", "conv3d") or isinstance(call.argument(4, "padding", 0), str):
        return None
    rates = set(_each(call, "dilation", 1))
    return rates.pop() if len(rates) == 1 and any(size > 1 for size in _kernel(call)) else None


def _kernel(call: Call) -> tuple[int, ...]:
    return tuple(call.argument(1, "weight").shape[2:])


def _each(call: Call, name: str, default: int) -> list[int]:
    """One for each axis."""
    found, axes = call.argument(PLACES[name], name, default), len(_kernel(call))
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    return found * axes if len(found) == 1 else found


def _again(call: Call, x: Tensor, padding: list[int], rate: int) -> Any:
    given = {"weight": call.argument(1, "weight"), "bias": call.argument(2, "bias")}
    groups = call.argument(6, "groups", 1)
    stride = _each(call, "stride", 1)
    return call.function(x, **given, stride=stride, padding=padding, dilation=rate, groups=groups)


def _padded_within(call: Call, own: int, rate: int) -> Any:
    """What is left over, or lacks, is at the end, where a causal convolution is cut."""
    padding = [p * rate // own for p in _each(call, "padding", 0)]
    made, size = _again(call, call.argument(0, "input"), padding, rate), call.run().shape
    axes = len(padding)
    lacks = (n for a, b in zip(size[-axes:], made.shape[-axes:], strict=True) for n in (a - b, 0))
    return F.pad(made, [*lacks][::-1])


def _padded_before(call: Call, own: int, rate: int, sides: int) -> Any:
    """With as much more before it, or less."""
    more = [(size - 1) * (rate - own) for size in _kernel(call)]
    after = [m // 2 if sides == 2 else 0 for m in more]
    ends = [n for m, right in zip(more, after, strict=True) for n in (right, m - right)]
    return _again(call, F.pad(call.argument(0, "input"), ends[::-1]), [0] * len(more), rate)
