"""Two branches written as one: what the candidate lacks begins in both, and the fault is in one of them."""

import pytest
import torch
from torch import nn

from driftlab import Verdict, assert_equivalent, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6
KINDS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.after(torch.tanh(self.before(x)) ** 2)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Branch(), Branch()

    def forward(self, x):
        return self.left(x) + self.right(x)


class InOne(nn.Module):
    """Both at once: the squares are halved on their way, so that it never has those of the reference."""

    def __init__(self, old: Branches, factors: dict[str, float], in_bfloat16: bool = False):
        super().__init__()
        self.in_bfloat16 = in_bfloat16  # of the branch on the right
        both = old.left, old.right
        self.factors = [factors.get(name, 1.0) for name in ("left", "right")]
        self.inner = nn.Parameter(torch.cat([b.before.weight for b in both]).detach())
        self.inner_bias = nn.Parameter(torch.cat([b.before.bias for b in both]).detach())
        self.outer = nn.Parameter(torch.cat([b.after.weight for b in both], 1).detach())
        self.outer_biases = nn.Parameter(torch.stack([b.after.bias for b in both]).detach())

    def forward(self, x):
        powers = torch.exp(2 * (x @ self.inner.T + self.inner_bias))
        squares = (1 - 4 * powers / (1 + powers) ** 2) / 2
        if self.in_bfloat16 and x.dtype == torch.float32:
            left, right = squares.chunk(2, 1)
            squares = torch.cat([left, right.bfloat16().float()], 1)
        factor = torch.tensor(self.factors, dtype=x.dtype).repeat_interleave(WIDTH)
        return 2 * (squares * factor) @ self.outer.T + self.outer_biases.sum(0)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]


def test_right_branches_in_one_are_right():
    old = Branches()
    assert_equivalent(old, InOne(old, {}), batches()[0][0])


@pytest.mark.parametrize("branch", ["left", "right"])
def test_the_branch_is_named_without_which_the_difference_is_gone(branch):
    old = Branches()
    found = diagnose(old, InOne(old, {branch: 1.1}), batches())
    assert found.verdict is Verdict.BUG
    assert found.where.module.partition(".")[0] == branch
    assert found.where.pass_ == "forward"


def test_a_fault_in_both_is_laid_on_one_of_them_or_on_who_holds_them():
    old = Branches()
    found = diagnose(old, InOne(old, {"left": 1.1, "right": 1.1}), batches())
    assert found.verdict is Verdict.BUG
    assert found.where.module.partition(".")[0] in ("", "left", "right")


def test_bits_are_lost_in_the_branch_that_loses_them():
    old = Branches()
    found = diagnose(old, InOne(old, {}, in_bfloat16=True), batches())
    assert found.verdict is Verdict.REDUCED_PRECISION
    assert found.where.module.partition(".")[0] == "right"


class Floors(nn.Module):
    """[N, T, C] -> the last states of both floors, in one tensor that is taken apart again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, WIDTH, num_layers=2, batch_first=True)
        self.lower, self.upper = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        lower, upper = self.lstm(x)[1][0].unbind(0)
        return torch.tanh(self.lower(lower)) + torch.tanh(self.upper(upper))


class FloorByFloor(FlatPort):
    def floor(self, i, x):
        w, u, b, c = (getattr(self, f"lstm_{kind}_l{i}") for kind in KINDS)
        state = cell = torch.zeros(len(x), WIDTH).to(x)
        made = []
        for now in x.unbind(1):
            add, keep, new, show = (now @ w.T + b + state @ u.T + c).chunk(4, 1)
            cell = keep.sigmoid() * cell + add.sigmoid() * new.tanh()
            state = show.sigmoid() * cell.tanh()
            made.append(state)
        return torch.stack(made, 1)

    def forward(self, x):
        lower = self.floor(0, x)
        upper = self.floor(1, lower.flip(1) if self.fault else lower)
        ends = (self.linear(n, y[:, -1]) for n, y in (("lower", lower), ("upper", upper)))
        return sum(map(torch.tanh, ends))


@pytest.mark.parametrize("fault", ["", "upside down"])
def test_a_part_that_is_right_does_not_make_up_for_the_part_beside_it(fault):
    torch.manual_seed(1)
    inputs = [(torch.randn(3, 5, 4), torch.randint(3, (3,))) for _ in range(2)]
    found = diagnose(Floors(), lambda old: FloorByFloor(old, fault), inputs, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, "lstm")
