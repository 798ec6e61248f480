"""Faults in the hand-written backward pass of a linear layer; the forward pass is right."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bench.case import in_place_of
from bench.cases._bug_parts import HandWrittenLinear
from bench.tasks import Task, mlp, transformer


def backward(name: str, at: str, kind: str, on: Task, **rule: Callable) -> None:
    """A case whose layer ``at`` takes its input's, weight's or bias' gradient by another rule."""
    passes = "input gradient" if "input" in rule else "weight gradient"
    in_place_of(at, "bug", kind, on, name, passes=passes)(lambda layer: HandWrittenLinear(layer, **rule))


def _chunks(x: Tensor) -> list[Tensor]:
    return list(x[: len(x) // 8 * 8].split(8))


def _without_the_remainder(g: Tensor, x: Tensor) -> Tensor:
    return sum(a.T @ b for a, b in zip(_chunks(g), _chunks(x), strict=True))


# The bias gradient is the mean over the batch, not the sum.
kind = "bias gradient by the mean"
backward("bias_gradient_by_the_mean", "fc2", kind, mlp, bias=lambda g: g.mean(0))
# x^T g for g^T x; the weight is square.
kind, at = "weight gradient transposed", "blocks.0.attention.out"
backward("square_weight_gradient_transposed", at, kind, transformer, weight=lambda g, x: x.T @ g)
# g W^T for g W; the weight is square.
kind, at = "input gradient by the transpose", "blocks.1.attention.out"
backward("square_input_gradient_transposed", at, kind, transformer, input=lambda g, w: g @ w.T)
# A chunked sum over the batch drops its remainder: 17 samples in chunks of 8.
kind, rule = "gradient of a sample missing", _without_the_remainder
backward("weight_gradient_without_the_last_sample", "fc3", kind, mlp, weight=rule)
# The gradient is clamped inside the backward pass.
kind, clamped = "gradient clamped", lambda g, w: (g @ w).clamp(-0.003, 0.003)
backward("input_gradient_clamped", "blocks.0.up", kind, transformer, input=clamped)
backward("weight_gradient_clamped", "fc2", kind, mlp, weight=lambda g, x: (g.T @ x).clamp(-0.02, 0.02))
