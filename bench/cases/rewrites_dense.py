"""True rewrites of a linear layer of the MLP and the transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, LinearWeights, copied, linear_of, rewritten
from bench.tasks import mlp, transformer, two_inputs


class OutSplit(nn.Module):
    def __init__(self, linear: nn.Linear, at: int):
        super().__init__()
        self.first = linear_of(linear.weight[:at], linear.bias[:at])
        self.second = linear_of(linear.weight[at:], linear.bias[at:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], -1)


class InSplit(nn.Module):
    def __init__(self, linear: nn.Linear, parts: int):
        super().__init__()
        slices = linear.weight.chunk(parts, 1)
        biases = [linear.bias] + [None] * (parts - 1)
        self.parts = nn.ModuleList(map(linear_of, slices, biases))

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(piece) for part, piece in zip(self.parts, x.chunk(len(self.parts), -1), strict=True))


@in_place_of("blocks.0.up", SAME, "linear stored transposed", transformer, "linear_stored_transposed")
class Transposed(nn.Module):
    """The weight is kept as [inputs, outputs], as in JAX and TensorFlow."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.bias = copied(linear.weight.T), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.bias


class Addmm(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


@case(SAME, "linear split by outputs", on=mlp)
def linear_out_split(model: nn.Module) -> nn.Module:
    """Two layers make 20 and 28 of the 48 features."""
    return rewritten(model, "fc1", lambda linear: OutSplit(linear, 20))


@case(SAME, "linear split by inputs", on=mlp)
def linear_in_split(model: nn.Module) -> nn.Module:
    """Three layers read 16 features each and are added."""
    return rewritten(model, "fc2", lambda linear: InSplit(linear, 3))


@in_place_of("", SAME, "linear split by inputs", two_inputs, "joint_layer_split_by_branch")
class JointByBranch(nn.Module):
    """The layer on the joined features as the sum of a layer on each branch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.conv, self.table, self.act = model.conv, model.table, model.act
        weight = model.joint.weight
        self.from_signal = linear_of(weight[:, :6], model.joint.bias)
        self.from_table = linear_of(weight[:, 6:])

    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        signal, table = self.act(self.conv(signal)).mean(2), self.act(self.table(table))
        logits = self.from_signal(signal) + self.from_table(table)
        return {"logits": logits, "features": torch.cat([signal, table], 1)}


@in_place_of("blocks.1.down", SAME, "linear by einsum", transformer, "linear_einsum")
class Einsum(LinearWeights):
    """``einsum`` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


@case(SAME, "linear by a low-level call", on=mlp)
def linear_addmm(model: nn.Module) -> nn.Module:
    """All three layers by ``torch.addmm``."""
    for name in ("fc1", "fc2", "fc3"):
        rewritten(model, name, Addmm)
    return model


@in_place_of("fc2", SAME, "linear row by row", mlp, "linear_row_by_row")
class RowByRow(LinearWeights):
    """A matrix-vector product for each example."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.mv(self.weight, row) + self.bias for row in x])


@in_place_of(
    "blocks.0.attention.out", SAME, "linear by elementwise products", transformer, "linear_multiply_then_sum"
)
class MultiplyThenSum(LinearWeights):
    """A broadcast product, summed over the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1) + self.bias


@in_place_of("fc1", SAME, "linear by elementwise products", mlp, "linear_by_outer_products")
class OuterProducts(LinearWeights):
    """One input feature after another is added on, the bias first."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bias.expand(*x.shape[:-1], -1)
        for i in range(x.shape[-1]):
            y = y + x[..., i, None] * self.weight[:, i]
        return y


@in_place_of("fc3", SAME, "bias as a column of the weight", mlp, "linear_bias_as_column")
class BiasAsColumn(nn.Module):
    """One matrix [W | b] on inputs with a one appended."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = copied(torch.cat([linear.weight, linear.bias[:, None]], 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0) @ self.weight.T


@in_place_of("blocks.1.up", SAME, "linear as 1x1 conv", transformer, "linear_as_pointwise_conv")
class PointwiseConv(nn.Module):
    """A conv of kernel 1 along the sequence."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.conv = nn.Conv1d(linear.in_features, linear.out_features, 1)
        self.conv.load_state_dict({"weight": linear.weight[..., None], "bias": linear.bias})

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)
