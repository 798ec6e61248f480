"""True rewrites of a linear layer of the MLP and the transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME, LinearWeights, copied, rewritten
from experiments.calibration.tasks import mlp, transformer, two_inputs


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of these weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = copied(weight)
    if bias is not None:
        linear.bias = copied(bias)
    return linear


class OutSplit(nn.Module):
    def __init__(self, linear: nn.Linear, at: int):
        super().__init__()
        self.first = _linear(linear.weight[:at], linear.bias[:at])
        self.second = _linear(linear.weight[at:], linear.bias[at:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], -1)


class InSplit(nn.Module):
    def __init__(self, linear: nn.Linear, parts: int):
        super().__init__()
        slices = linear.weight.chunk(parts, 1)
        biases = [linear.bias] + [None] * (parts - 1)
        self.parts = nn.ModuleList(map(_linear, slices, biases))

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(piece) for part, piece in zip(self.parts, x.chunk(len(self.parts), -1), strict=True))


class Transposed(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.bias = copied(linear.weight.T), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.bias


class Einsum(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


class Addmm(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


class RowByRow(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.mv(self.weight, row) + self.bias for row in x])


class MultiplyThenSum(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


class OuterProducts(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bias.expand(*x.shape[:-1], -1)
        for i in range(x.shape[-1]):
            y = y + x[..., i, None] * self.weight[:, i]
        return y


class BiasAsColumn(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = copied(torch.cat([linear.weight, linear.bias[:, None]], 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0) @ self.weight.T


class PointwiseConv(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.conv = nn.Conv1d(linear.in_features, linear.out_features, 1)
        self.conv.load_state_dict({"weight": linear.weight[..., None], "bias": linear.bias})

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class JointByBranch(nn.Module):
    """``TwoInputs`` whose joint layer is one linear layer a branch, added."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.conv, self.table, self.act = model.conv, model.table, model.act
        weight = model.joint.weight
        self.from_signal = _linear(weight[:, :6], model.joint.bias)
        self.from_table = _linear(weight[:, 6:])

    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        signal, table = self.act(self.conv(signal)).mean(2), self.act(self.table(table))
        logits = self.from_signal(signal) + self.from_table(table)
        return {"logits": logits, "features": torch.cat([signal, table], 1)}


@case(SAME, "linear split by outputs", on=mlp)
def linear_out_split(model: nn.Module) -> nn.Module:
    """Two layers make 20 and 28 of the 48 features."""
    return rewritten(model, "fc1", lambda linear: OutSplit(linear, 20))


@case(SAME, "linear split by inputs", on=mlp)
def linear_in_split(model: nn.Module) -> nn.Module:
    """Three layers read 16 features each and are added."""
    return rewritten(model, "fc2", lambda linear: InSplit(linear, 3))


@case(SAME, "linear split by inputs", on=two_inputs)
def joint_layer_split_by_branch(model: nn.Module) -> nn.Module:
    """The layer on the joined features as the sum of a layer on each branch."""
    return JointByBranch(model)


@case(SAME, "linear stored transposed", on=transformer)
def linear_stored_transposed(model: nn.Module) -> nn.Module:
    """The weight is kept as [inputs, outputs], as in JAX and TensorFlow."""
    return rewritten(model, "blocks.0.up", Transposed)


@case(SAME, "linear by einsum", on=transformer)
def linear_einsum(model: nn.Module) -> nn.Module:
    """``einsum`` over the last dimension."""
    return rewritten(model, "blocks.1.down", Einsum)


@case(SAME, "linear by a low-level call", on=mlp)
def linear_addmm(model: nn.Module) -> nn.Module:
    """All three layers by ``torch.addmm``."""
    for name in ("fc1", "fc2", "fc3"):
        rewritten(model, name, Addmm)
    return model


@case(SAME, "linear row by row", on=mlp)
def linear_row_by_row(model: nn.Module) -> nn.Module:
    """A matrix-vector product for each example."""
    return rewritten(model, "fc2", RowByRow)


@case(SAME, "linear by elementwise products", on=transformer)
def linear_multiply_then_sum(model: nn.Module) -> nn.Module:
    """A broadcast product, summed over the inputs."""
    return rewritten(model, "blocks.0.attention.out", MultiplyThenSum)


@case(SAME, "linear by elementwise products", on=mlp)
def linear_by_outer_products(model: nn.Module) -> nn.Module:
    """One input feature after another is added on, the bias first."""
    return rewritten(model, "fc1", OuterProducts)


@case(SAME, "bias as a column of the weight", on=mlp)
def linear_bias_as_column(model: nn.Module) -> nn.Module:
    """One matrix [W | b] on inputs with a one appended."""
    return rewritten(model, "fc3", BiasAsColumn)


@case(SAME, "linear as 1x1 conv", on=transformer)
def linear_as_pointwise_conv(model: nn.Module) -> nn.Module:
    """A conv of kernel 1 along the sequence."""
    return rewritten(model, "blocks.1.up", PointwiseConv)
