"""A right rewrite, late faults, one under autocast alone: of networks that begin with a linear layer."""

import torch
import torch.nn.functional as F
from torch import nn


class Halves(nn.Module):
    """A linear layer as the sum of two; from ``after`` calls of ``now`` on a tenth of a percent too large."""

    def __init__(self, linear, late=lambda: False):
        super().__init__()
        self.half, self.late = linear.in_features // 2, late
        self.left = nn.Parameter(linear.weight.detach()[:, : self.half].clone())
        self.right = nn.Parameter(linear.weight.detach()[:, self.half :].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        y = x[..., : self.half] @ self.left.T + x[..., self.half :] @ self.right.T + self.bias
        return y * 1.001 if self.late() else y


class OtherUnderAutocast(nn.Module):
    """A linear layer that under autocast, and there alone, is another function."""

    def __init__(self, whole):
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias

    def forward(self, x):
        out = F.linear(x, self.weight, self.bias)
        return out * 1.01 if torch.is_autocast_enabled("cpu") else out


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 5))


def rewritten(late=lambda: False):
    def rewrite(model):
        model[0] = Halves(model[0], late)
        return model

    return rewrite


class Counting(Halves):
    """Counts its training calls: in an attribute, a buffer, or a sum in sixteen bits that turns negative."""

    def __init__(self, linear, how, sets_in):
        super().__init__(linear)
        self.how, self.sets_in, self.calls, self.each = how, sets_in, 0, -(-(2**15) // (sets_in + 1))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("total", torch.zeros((), dtype=torch.int16))
        self.late = self.has_set_in

    def has_set_in(self):
        if self.training:
            self.calls += 1
            self.seen += 1
            self.total += self.each
        counts = {"attribute": self.calls, "buffer": int(self.seen), "neither": 0}
        return self.total < 0 if self.how == "overflow" else counts[self.how] > self.sets_in


def counting(how, sets_in):
    def rewrite(model):
        model[0] = Counting(model[0], how, sets_in)
        return model

    return rewrite
