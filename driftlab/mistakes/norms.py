"""torch's norms written out, so that what they divide by, or the way back, may be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from driftlab.mistakes.torch_call import Call

# What is normed, its mean (0.0 where none is taken off), and its variance, or mean square.
_Parts = tuple[Tensor, Tensor | float, Tensor]


def written_out(call: Call, root: Callable[[Tensor], Tensor], held: bool = False) -> Tensor:
    """A norm of torch's.

    Args:
        call: of one of ``NORMS``, whose arguments are known.
        root: what is divided by, of the variance.
        held: whether mean and variance are constants on the way back.
    """
    given = call.given() or {}
    if given.get("running_mean") is not None and has_own_statistics(call.name, given):
        call.again(input=given["input"].detach())  # its buffers move as they did
    x, mean, spread = NORMS[call.name](given)
    if held:
        mean, spread = (t.detach() if isinstance(t, Tensor) else t for t in (mean, spread))
    out = ((x - mean) / root(spread)).reshape(given["input"].shape)
    out = out if given.get("weight") is None else out * _beside(out, given["weight"], call.name)
    return out if given.get("bias") is None else out + _beside(out, given["bias"], call.name)


def has_own_statistics(name: str, given: dict[str, Any]) -> bool:
    """Whether it norms by the statistics of what it is given, and not by those that it keeps."""
    return given.get({"batch_norm": "training", "instance_norm": "use_input_stats"}.get(name, ""), True)


def _beside(x: Tensor, parameter: Tensor, name: str) -> Tensor:
    """One number a channel, or one for each that is normed together."""
    return parameter if name in ("layer_norm", "rms_norm") else _by_channel(x, parameter)


def _by_channel(x: Tensor, values: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor, dims: list[int]) -> _Parts:
    return x, x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)


def _batch(given: dict[str, Any]) -> _Parts:
    x = given["input"]
    if has_own_statistics("batch_norm", given):
        return _statistics(x, [0, *range(2, x.dim())])
    return x, _by_channel(x, given["running_mean"]), _by_channel(x, given["running_var"])


def _instance(given: dict[str, Any]) -> _Parts:
    x = given["input"]
    if has_own_statistics("instance_norm", given):
        return _statistics(x, [*range(2, x.dim())])
    return x, _by_channel(x, given["running_mean"]), _by_channel(x, given["running_var"])


def _group(given: dict[str, Any]) -> _Parts:
    return _statistics(given["input"].reshape(len(given["input"]), given["num_groups"], -1), [2])


def _layer(given: dict[str, Any]) -> _Parts:
    return _statistics(given["input"], _last(given))


def _root_mean_square(given: dict[str, Any]) -> _Parts:
    x = given["input"]
    return x, 0.0, x.square().mean(_last(given), keepdim=True)


def _last(given: dict[str, Any]) -> list[int]:
    return [*range(-len(given["normalized_shape"]), 0)]


NORMS: dict[str, Callable[[dict[str, Any]], _Parts]] = {
    "batch_norm": _batch,
    "instance_norm": _instance,
    "group_norm": _group,
    "layer_norm": _layer,
    "rms_norm": _root_mean_square,
}
