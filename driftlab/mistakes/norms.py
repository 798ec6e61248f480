"""torch's norms written out, so that what they take away or divide by, or the way back, may be another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

# So many streams, or maps of one width, are joined as a rule.
PARTS = (2, 3, 4)
# What is normed, its mean (0.0 where none is taken off), and its variance, or mean square.
Parts = tuple[Tensor, Tensor | float, Tensor]


def written_out(
    call: Call,
    root: Callable[[Tensor], Tensor] | None = None,
    parts: Callable[[Parts], Parts] = lambda parts: parts,
) -> Tensor:
    """A norm of torch's.

    Args:
        call: of one of ``NORMS``, whose arguments are known.
        root: what is divided by, of the variance; None its root, with the epsilon in it.
        parts: makes others of what it is made of.
    """
    given = call.given() or {}
    if given.get("running_mean") is not None and has_own_statistics(call.name, given):
        call.again(input=given["input"].detach())  # its buffers move as they did
    x, mean, spread = parts(NORMS[call.name](given))
    by = (spread + epsilon_in(given)).sqrt() if root is None else root(spread)
    out = ((x - mean) / by).reshape(given["input"].shape)
    out = out if given.get("weight") is None else out * _beside(out, given["weight"], call.name)
    return out if given.get("bias") is None else out + _beside(out, given["bias"], call.name)


def epsilon_in(given: dict[str, Any]) -> float:
    """By a norm's arguments; the unit of what it norms where none is given, and 0 where that is."""
    return torch.finfo(given["input"].dtype).eps if given["eps"] is None else given["eps"]


def has_own_statistics(name: str, given: dict[str, Any]) -> bool:
    """Whether it norms by the statistics of what it is given, and not by those that it keeps."""
    return given.get({"batch_norm": "training", "instance_norm": "use_input_stats"}.get(name, ""), True)


def _beside(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """One number a channel, or one for each that is normed together."""
    return parameter if name in ("layer_norm", "rms_norm") else _by_channel(x, parameter)


def _by_channel(x: Tensor, values: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor, dims: list[int]) -> Parts:
    return x, x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)


def _squares(x: Tensor, dims: list[int]) -> Parts:
    return x, 0.0, x.square().mean(dims, keepdim=True)


def _batch(given: dict[str, Any]) -> Parts:
    x = given["input"]
    if has_own_statistics("batch_norm", given):
        return _statistics(x, [0, *range(2, x.dim())])
    return x, _by_channel(x, given["running_mean"]), _by_channel(x, given["running_var"])


def _instance(given: dict[str, Any]) -> Parts:
    x = given["input"]
    if has_own_statistics("instance_norm", given):
        return _statistics(x, [*range(2, x.dim())])
    return x, _by_channel(x, given["running_mean"]), _by_channel(x, given["running_var"])


def _group(given: dict[str, Any]) -> Parts:
    return _statistics(given["input"].reshape(len(given["input"]), given["num_groups"], -1), [2])


def _layer(given: dict[str, Any]) -> Parts:
    return _statistics(given["input"], _last(given))


def _root_mean_square(given: dict[str, Any]) -> Parts:
    return _squares(given["input"], _last(given))


def _last(given: dict[str, Any]) -> list[int]:
    return [*range(-len(given["normalized_shape"]), 0)]


NORMS: dict[str, Callable[[dict[str, Any]], Parts]] = {
    "batch_norm": _batch,
    "instance_norm": _instance,
    "group_norm": _group,
    "layer_norm": _layer,
    "rms_norm": _root_mean_square,
}


def normed_otherwise(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of a norm by its own statistics: with or without the mean, a variance over n - 1, other groups or axes.

    What is joined of several before a norm is normed in its parts.
    """
    given = call.given() if call.name in NORMS and call.tensors else None
    if not given or not has_own_statistics(call.name, given):
        return
    if call.name in ("layer_norm", "rms_norm"):
        last, *others = reversed(given["normalized_shape"])
        for parts in (n for n in PARTS if last % n == 0 and not others):
            words = f"each of {parts} parts by itself in `{call.name}`"
            yield words, lambda parts=parts: written_out(call, parts=partial(_in_parts, parts))
    x = given["input"]
    for axes in _other_axes(call.name, given):
        words = f"statistics over the axes {axes} in `{call.name}`"
        yield words, lambda axes=axes: written_out(call, parts=partial(_over, x, axes))
    if call.name == "rms_norm":
        yield "the mean taken away in `rms_norm`", lambda: written_out(call, parts=_centred)
        return
    if call.name == "group_norm":
        channels, own = x.shape[1], given["num_groups"]
        for groups in (n for n in range(1, channels + 1) if channels % n == 0 and n != own):
            yield f"{groups} groups in `group_norm`", partial(call.again, num_groups=groups)
    yield f"no mean taken away in `{call.name}`", lambda: written_out(call, parts=_uncentred)
    yield f"a variance over n - 1, not n, in `{call.name}`", lambda: written_out(call, parts=_corrected)


def _other_axes(name: str, given: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    """Those of the other norms, of one position alone, and the last; groups are taken for one."""
    x = given["input"]
    dims = tuple(range(x.dim()))
    last = len(given.get("normalized_shape", ()))
    own = {"batch_norm": (0, *dims[2:]), "instance_norm": dims[2:], "group_norm": dims[1:]}
    others = dict.fromkeys([dims[1:2], dims[1:], dims[2:], (0, *dims[2:]), dims[-1:]])
    taken = own.get(name, dims[len(dims) - last :])
    yield from (axes for axes in others if axes != taken and math.prod(x.shape[at] for at in axes) > 1)


def _over(x: Tensor, axes: tuple[int, ...], parts: Parts) -> Parts:
    if isinstance(parts[1], Tensor):
        return _statistics(x, [*axes])
    return _squares(x, [*axes])


def _in_parts(count: int, parts: Parts) -> Parts:
    x, mean, _ = parts
    x = x.unflatten(-1, (count, -1))
    mean = x.mean(-1, keepdim=True) if isinstance(mean, Tensor) else mean
    return x, mean, (x - mean).square().mean(-1, keepdim=True)


def _centred(parts: Parts) -> Parts:
    x, _, square = parts
    mean = x.mean([dim for dim, size in enumerate(square.shape) if size == 1 < x.shape[dim]], keepdim=True)
    return x, mean, square - mean.square()


def _uncentred(parts: Parts) -> Parts:
    x, mean, spread = parts
    return x, 0.0, spread + mean * mean


def _corrected(parts: Parts) -> Parts:
    x, mean, spread = parts
    n = x.numel() / spread.numel()
    return x, mean, spread * (n / (n - 1))
