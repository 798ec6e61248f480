"""A norm's epsilon on the other side of its root: 1 / sqrt(v + eps) against 1 / (sqrt(v) + eps)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from driftlab.arithmetic.torch_call import Call

# An epsilon is no larger.
LARGEST = 1e-2


def other_side() -> tuple[Callable[[Call], bool], Callable[[Call], Any]]:
    """Whether a call has a part in it, and what it gives instead.

    The norms of torch have it inside. Of code that is written out, a sum with a small number is remembered
    until its root is taken, and a root until a small number is added.
    """
    sums: list[tuple[Tensor, Tensor, float]] = []  # v + eps, v, eps
    roots: list[tuple[Tensor, Tensor]] = []  # sqrt(v), v

    def known(of: list, call: Call) -> tuple | None:
        return next((kept for kept in of if call.args and kept[0] is call.args[0]), None)

    def concerns(call: Call) -> bool:
        return call.name in _NORMS or _is_root(call) or _small(call) is not None

    def change(call: Call) -> Any:
        if call.name in _NORMS:
            return _NORMS[call.name](call)
        if (eps := _small(call)) is not None:
            if (root := known(roots, call)) is not None:
                return (root[1] + eps).sqrt()
            out = call.run()
            sums.append((out, call.args[0], eps))
            return out
        if (summed := known(sums, call)) is not None:
            root = summed[1].sqrt() + summed[2]
            return 1 / root if _is_reciprocal(call) else root
        out = call.run()
        roots.append((out, call.args[0]))
        return out

    return concerns, change


def _small(call: Call) -> float | None:
    found = call.number() if call.name == "add" else None
    return float(found[1]) if found and found[0] == 1 and 0 < found[1] <= LARGEST else None


def _is_root(call: Call) -> bool:
    return call.name in ("sqrt", "rsqrt") or (call.name == "pow" and _exponent(call) in (0.5, -0.5))


def _is_reciprocal(call: Call) -> bool:
    return call.name == "rsqrt" or (call.name == "pow" and _exponent(call) == -0.5)


def _exponent(call: Call) -> float | None:
    return call.args[1] if len(call.args) == 2 and isinstance(call.args[1], float) else None


def _layer_norm(call: Call) -> Tensor:
    g = call.given()
    dims = list(range(-len(g["normalized_shape"]), 0))
    x = g["input"]
    mean, var = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
    return _affine((x - mean) / (var.sqrt() + g["eps"]), g["weight"], g["bias"])


def _rms_norm(call: Call) -> Tensor:
    g = call.given()
    dims = list(range(-len(g["normalized_shape"]), 0))
    mean = (g["input"] ** 2).mean(dims, keepdim=True)
    return _affine(g["input"] / (mean.sqrt() + epsilon_in(g)), g["weight"], None)


def _batch_norm(call: Call) -> Tensor:
    g, x = call.given(), call.given()["input"]
    mean, var = g["running_mean"], g["running_var"]
    if g["training"]:
        call.run()  # its buffers move as they did
        dims = [d for d in range(x.dim()) if d != 1]
        mean, var = x.mean(dims), x.var(dims, correction=0)
    shape = (-1, *[1] * (x.dim() - 2))
    out = (x - mean.view(shape)) / (var.view(shape).sqrt() + g["eps"])
    return _affine(out, *(None if t is None else t.view(shape) for t in (g["weight"], g["bias"])))


def _group_norm(call: Call) -> Tensor:
    g, x = call.given(), call.given()["input"]
    grouped = x.reshape(x.shape[0], g["num_groups"], -1)
    mean, var = grouped.mean(-1, keepdim=True), grouped.var(-1, correction=0, keepdim=True)
    out = ((grouped - mean) / (var.sqrt() + g["eps"])).view(x.shape)
    shape = (-1, *[1] * (x.dim() - 2))
    return _affine(out, *(None if t is None else t.view(shape) for t in (g["weight"], g["bias"])))


def epsilon_in(given: dict[str, Any]) -> float:
    """Of a norm, by its arguments: float32's own unit where none is given, and 0 where that is."""
    return 2.0**-23 if given["eps"] is None else given["eps"]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_NORMS = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
}
