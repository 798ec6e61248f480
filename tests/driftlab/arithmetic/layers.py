"""What the tests of the probes share: a layer that can be spoilt in every pass, and what it is given."""

import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.passes import Recorded


def plain(x):
    return x


class Layer(nn.Module):
    """A linear layer and a norm, with something done to what goes in, to the weight, and to the result."""

    def __init__(self, on_input=plain, on_weight=plain, on_result=plain, on_eval=plain, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=momentum)
        self.on_input, self.on_weight = on_input, on_weight
        self.on_result, self.on_eval = on_result, on_eval

    def forward(self, x):
        y = F.linear(self.on_input(x), self.on_weight(self.fc.weight), self.fc.bias)
        y = self.on_result(self.norm(y))
        return y if self.training else self.on_eval(y)


def call():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 6, generator=generator).requires_grad_()
    return Recorded((x,), gradients={"": torch.randn(7, 5, generator=generator)})


class Halves(nn.Module):
    """A linear layer as two."""

    def __init__(self, linear):
        super().__init__()
        sizes = [linear.out_features // 2, linear.out_features - linear.out_features // 2]
        self.parts = nn.ModuleList(nn.Linear(linear.in_features, size) for size in sizes)
        for part, weight, bias in zip(
            self.parts, linear.weight.split(sizes), linear.bias.split(sizes), strict=True
        ):
            part.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], -1)


def joined(mine="", theirs=""):
    """The fold of ``Halves``, behind prefixes."""

    def fold(tensors):
        kinds = dict.fromkeys(n.rpartition(".")[2] for n in tensors)
        return {f"{mine}{k}": torch.cat([tensors[f"{theirs}parts.{i}.{k}"] for i in (0, 1)]) for k in kinds}

    return fold


class Scaled(torch.autograd.Function):
    """Nothing, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.0001 * gradient


# One in each pass, by name.
FAULTS = {
    "forward": {"on_result": lambda y: y * (1 + 1e-7)},
    "input gradient": {"on_input": Scaled.apply},
    "weight gradient": {"on_weight": Scaled.apply},
    "buffer": {"momentum": 0.1001},
    "eval": {"on_eval": lambda y: y * (1 + 1e-7)},
}
