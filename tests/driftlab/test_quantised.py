"""Networks whose function is a staircase: weights of three values, rounded activations, straight through."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
IN, WIDTH = 6, 10


class Straight(torch.autograd.Function):
    """To whole numbers times a scale; the gradient goes straight through."""

    @staticmethod
    def forward(ctx, x, scale, most):
        return (x / scale).round().clamp(-most, most) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class BitLinear(nn.Linear):
    """As in BitNet b1.58 (Ma et al., The Era of 1-bit LLMs, 2024)."""

    def forward(self, x):
        x = Straight.apply(x, x.abs().amax(-1, keepdim=True) / 127, 127)
        return F.linear(x, Straight.apply(self.weight, self.weight.abs().mean(), 1), self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.head = BitLinear(IN, WIDTH), nn.LayerNorm(WIDTH), BitLinear(WIDTH, 3)
        for layer in (self.enter, self.head):
            thirds = torch.randint(-1, 2, layer.weight.shape) + 0.1 * torch.randn(layer.weight.shape)
            layer.weight.data = thirds / layer.in_features**0.5

    def forward(self, x):
        return self.head(self.norm(self.enter(x)).tanh())


class Compared(FlatPort):
    """Finds the three values by comparisons; ``fault`` is one of its head's activations or their gradient."""

    def bit_linear(self, name, x, fault=""):
        weight, scale = getattr(self, name + "_weight"), 127 / x.abs().amax(-1, keepdim=True)
        size = weight.abs().mean()
        ternary = (weight.abs() > size / 2) * weight.sign() * size
        lost = (x * scale).round() / scale - x
        if fault == "leak":
            x = (x * scale + (lost * scale).detach()) / scale
        elif fault != "unrounded" or self.training:
            x = x + lost.detach()
        return x @ (weight + (ternary - weight).detach()).T + getattr(self, name + "_bias")

    def forward(self, x):
        x = F.layer_norm(self.bit_linear("enter", x), (WIDTH,), self.norm_weight, self.norm_bias)
        return self.bit_linear("head", x.tanh(), self.fault)


@pytest.mark.parametrize(
    ("fault", "verdict"), [("", Verdict.ROUND_OFF), ("leak", Verdict.BUG), ("unrounded", Verdict.BUG)]
)
def test_a_grid_that_is_the_reference_s_is_its_function(fault, verdict):
    torch.manual_seed(1)
    batches = [(torch.randn(8, IN), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Net(), lambda old: Compared(old, fault), batches, loss=F.cross_entropy, steps=3)
    assert found.verdict is verdict
    assert fault != "unrounded" or found.where.pass_ == "eval"


def test_what_the_candidate_alone_rounds_is_its_precision():
    class Plain(Net):
        def __init__(self):
            super().__init__()
            self.enter.__class__ = self.head.__class__ = nn.Linear

    class Rounded(Plain):
        def forward(self, x):
            x = self.norm(self.enter(x)).tanh()
            return self.head(x + (Straight.apply(x, x.abs().max() / 127, 127) - x).detach())

    torch.manual_seed(1)
    batches = [(torch.randn(8, IN), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Plain(), Rounded(), batches, loss=F.cross_entropy, steps=3)
    assert found.verdict is Verdict.REDUCED_PRECISION
