"""A norm's epsilon on the other side of its root: 1 / sqrt(v + eps) against 1 / (sqrt(v) + eps)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from driftlab.mistakes.norms import epsilon_in, written_out
from driftlab.mistakes.torch_call import Call

# An epsilon is no larger.
LARGEST = 1e-2
_NORMS = ("layer_norm", "rms_norm", "batch_norm", "group_norm")


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
            eps = epsilon_in(call.given())
            return written_out(call, lambda spread: spread.sqrt() + eps)
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
