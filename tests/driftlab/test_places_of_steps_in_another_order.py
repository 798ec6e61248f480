"""Steps made in another order: a mean before or behind several, a weight that stands first; and a mask."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.4 + torch.rand(WIDTH))

    def forward(self, x):
        return self.weight * x


class Coupling(nn.Module):
    """Changes what the mask hides, by what it lets through (Dinh et al., RealNVP, 2017)."""

    def __init__(self):
        super().__init__()
        self.net, self.factor = nn.Linear(WIDTH, WIDTH), Factor()
        self.register_buffer("mask", (torch.arange(WIDTH) % 2).float())

    def forward(self, x):
        s = self.factor(torch.tanh(self.net(x * self.mask)))
        return x * (s * (1 - self.mask)).exp()


class Segment(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine, self.act, self.norm = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.act(self.affine(x)))


class Net(nn.Module):
    """[N, T, C] -> classes, by a mean of what is rectified, and what rectifies the mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.couplings = nn.ModuleList(Coupling() for _ in range(2))
        self.segment = Segment()
        self.early, self.late, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 3))

    def forward(self, x):
        for coupling in self.couplings:
            x = coupling(x)
        x = self.segment(x)
        return self.head(self.early(x).tanh().mean(1) + self.late(x.mean(1)).sin())


class Flat(FlatPort):
    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        for name, _ in old.segment.named_parameters(prefix="segment"):
            delattr(self, name.replace(".", "_"))
        self.segment = nn.ModuleList(copy.deepcopy([old.segment.affine, old.segment.norm]))

    def coupled(self, x, at):
        mask = (torch.arange(WIDTH) % 2).to(x)
        mask = 1 - mask if self.fault == "mask" and at == 1 else mask
        s = self.linear(f"couplings_{at}_net", x * mask)
        by = getattr(self, f"couplings_{at}_factor_weight")
        s = (s * by).tanh() if self.fault == "factor" and at == 1 else s.tanh() * by
        return x * torch.where(mask > 0, 1.0, s.exp())

    def forward(self, x):
        x = self.coupled(self.coupled(x, 0), 1)
        affine, norm = self.segment
        x = norm(affine(x)).clamp(min=0) if self.fault == "segment" else norm(affine(x).clamp(min=0))
        early, late = self.linear("early", x), self.linear("late", x)
        early = early.mean(1).tanh() if self.fault == "early" else early.tanh().mean(1)
        late = late.sin().mean(1) if self.fault == "late" else late.mean(1).sin()
        return self.linear("head", early + late)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("mask", "couplings.1", "`couplings.1.mask` turned over"),
        ("factor", "couplings.1", "`tanh` behind `mul`, not before it"),
        ("segment", "segment", "`relu` behind `layer_norm`, not before it"),
        ("early", "", "`mean` before `tanh`, not behind"),
        ("late", "", "`mean` behind `linear`, `sin`, not before"),
    ],
)
def test_the_order_is_named_with_whose_it_is(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 5, WIDTH), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert (found.verdict, found.where.pass_, found.where.module) == (Verdict.BUG, "forward", module)
    assert words in " ".join(str(found).split())


def test_in_its_own_order_it_is_right():
    torch.manual_seed(1)
    batches = [(torch.randn(4, 5, WIDTH), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), Flat, batches, loss=F.cross_entropy, steps=2)
    assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
