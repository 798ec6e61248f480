"""Faults in the hand-written backward pass of a linear layer; the forward pass is right."""

from __future__ import annotations

from torch import Tensor

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import HandWrittenLinear
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import mlp, transformer


@case("bug", "bias gradient by the mean", mlp, module="fc2", passes="weight gradient")
def bias_gradient_by_the_mean(model):
    """The bias gradient is the mean over the batch, not the sum."""
    return replace(model, "fc2", HandWrittenLinear(model.fc2, bias=lambda g: g.mean(0)))


@case(
    "bug",
    "weight gradient transposed",
    transformer,
    module="blocks.0.attention.out",
    passes="weight gradient",
)
def square_weight_gradient_transposed(model):
    """x^T g for g^T x; the weight is square."""
    layer = HandWrittenLinear(model.blocks[0].attention.out, weight=lambda g, x: x.T @ g)
    return replace(model, "blocks.0.attention.out", layer)


@case(
    "bug",
    "input gradient by the transpose",
    transformer,
    module="blocks.1.attention.out",
    passes="input gradient",
)
def square_input_gradient_transposed(model):
    """g W^T for g W; the weight is square."""
    layer = HandWrittenLinear(model.blocks[1].attention.out, input=lambda g, w: g @ w.T)
    return replace(model, "blocks.1.attention.out", layer)


@case("bug", "gradient of a sample missing", mlp, module="fc3", passes="weight gradient")
def weight_gradient_without_the_last_sample(model):
    """A chunked sum over the batch drops its remainder: 17 samples in chunks of 8."""
    layer = HandWrittenLinear(
        model.fc3, weight=lambda g, x: sum(a.T @ b for a, b in zip(_chunks(g), _chunks(x), strict=True))
    )
    return replace(model, "fc3", layer)


def _chunks(x: Tensor) -> list[Tensor]:
    return list(x[: len(x) // 8 * 8].split(8))


@case("bug", "gradient clamped", mlp, module="fc2", passes="weight gradient")
def weight_gradient_clamped(model):
    """The weight gradient is clamped inside the backward pass."""
    layer = HandWrittenLinear(model.fc2, weight=lambda g, x: (g.T @ x).clamp(-0.02, 0.02))
    return replace(model, "fc2", layer)


@case("bug", "gradient clamped", transformer, module="blocks.0.up", passes="input gradient")
def input_gradient_clamped(model):
    """The input gradient is clamped inside the backward pass."""
    layer = HandWrittenLinear(model.blocks[0].up, input=lambda g, w: (g @ w).clamp(-0.003, 0.003))
    return replace(model, "blocks.0.up", layer)
