"""Networks that draw their random numbers in another order: what of them is compared, and what is said."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 8
ACTS = {"gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.drop = norm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Port(nn.Module):
    """The same without blocks of their own, which draws a number first that it does not use."""

    def __init__(self, old, fault):
        super().__init__()
        self.fault, self.parts, self.head = fault, old.blocks, old.head
        if fault == "momentum":
            old.blocks[1].norm.momentum = 0.9

    def forward(self, x):
        torch.rand(1)
        for i, part in enumerate(self.parts):
            act = ACTS.get(self.fault, F.gelu) if i == 1 else F.gelu
            x = x + part.drop(part.down(act(part.up(part.norm(x)))))
        return self.head(x)


def judged(norm, fault=""):
    torch.manual_seed(1)
    batches = [(torch.randn(32, WIDTH), torch.randint(3, (32,))) for _ in range(2)]
    return diagnose(Net(norm), lambda old: Port(old, fault), batches, loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_the_same_function_in_eval_mode_is_said_to_be_the_same(norm):
    """The averages of a batch norm are of other masks then: what they make of eval mode is no fault."""
    found = judged(norm)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert "in eval mode, as both begin, they are the same function" in found.headline


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("fault", ["gelu", "relu"])
def test_another_function_has_its_place(norm, fault):
    """The one is seen by no mean over masks, the other by any."""
    found = judged(norm, fault)
    assert (found.verdict, found.where.module) == (Verdict.BUG, "blocks.1")
    assert "compared in eval mode" in found.headline


def test_averages_that_are_kept_otherwise_show_in_what_eval_mode_becomes():
    found = judged(nn.BatchNorm1d, "momentum")
    assert (found.verdict, found.where.pass_) == (Verdict.BUG, "eval")
