"""Where a module ends in the one network and not in the other: whose a mistake at that border is."""

import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 8


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Clock(nn.Module):
    """[N] -> [N, C]: waves of the time, and two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, time):
        return self.layers(waves(time.to(self.layers[0].weight), WIDTH // 2))


def waves(time, gaps):
    angles = time[:, None] / 100 ** (torch.arange(WIDTH // 2).to(time) / gaps)
    return torch.cat([angles.cos(), angles.sin()], 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.clock, self.block, self.norm, self.head = Clock(), Block(), RMSNorm(), nn.Linear(WIDTH, 3)

    def forward(self, x, time):
        return self.head(self.norm(self.block(x + self.clock(time))))


class Times(nn.Module):
    """The layers that stood in a module of their own are this one's."""

    def __init__(self, layers, gaps):
        super().__init__()
        self.inner, self.outer, self.gaps = layers[0], layers[2], gaps

    def forward(self, time):
        return self.outer(F.silu(self.inner(waves(time.to(self.inner.weight), self.gaps))))


class Port(nn.Module):
    def __init__(self, old, fault):
        super().__init__()
        self.fault = fault
        self.times = Times(old.clock.layers, WIDTH // 2 - (fault == "the longest period"))
        self.up, self.down, self.scale, self.end = old.block.up, old.block.down, old.norm.weight, old.head

    def forward(self, x, time):
        x = x + self.times(time)
        x = x + self.down(torch.tanh(self.up(x)))
        if self.fault == "a mean taken away":
            x = x - x.mean(-1, keepdim=True)
        return self.end(F.rms_norm(x, [WIDTH], self.scale, 1e-6))


def judged(fault):
    torch.manual_seed(1)
    batches = [((torch.randn(16, WIDTH), torch.randint(100, (16,))), torch.randint(3, (16,))) for _ in "12"]
    return diagnose(Net(), lambda old: Port(old, fault), batches, loss=F.cross_entropy, steps=2)


def test_what_is_done_besides_to_a_value_of_both_is_done_by_who_goes_on_with_it():
    found = judged("a mean taken away")
    assert (found.verdict, found.where.module) == (Verdict.BUG, "norm")


def test_where_one_module_stands_for_two_the_inner_is_no_place_unless_it_is_given_the_same():
    found = judged("the longest period")
    assert (found.verdict, found.where.module) == (Verdict.BUG, "clock")


def test_other_borders_are_no_fault():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


class Normed(nn.Module):
    """[N, C, T] -> [N, 3]"""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.conv(x))).mean(-1))


class FoldedInEvaluation(FlatPort):
    def __init__(self, old):
        super().__init__(old)
        self.register_buffer("kept", torch.stack([old.norm.running_mean, old.norm.running_var]))

    def forward(self, x):
        gain, shift, bias = self.norm_weight, self.norm_bias, self.conv_bias
        mean, spread = self.kept
        if self.training:
            x = F.batch_norm(F.conv1d(x, self.conv_weight, bias), mean, spread, gain, shift, True)
        else:
            scale = gain * (spread + 1e-5).rsqrt()
            taps = self.conv_weight * scale[:, None, None]
            x = F.conv1d(x, taps, shift + bias - mean * scale)  # the bias is not scaled
        return self.linear("head", torch.tanh(x).mean(-1))


def test_of_a_norm_that_is_folded_in_eval_mode_the_norm_is_named():
    torch.manual_seed(1)
    batches = [(torch.randn(8, 4, 9), torch.randint(3, (8,))) for _ in range(2)]
    found = diagnose(Normed(), FoldedInEvaluation, batches, loss=F.cross_entropy, steps=2)
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, "norm", "eval")
