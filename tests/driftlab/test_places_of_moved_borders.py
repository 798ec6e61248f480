"""Pairs of modules that are no pairs: a skip inside or outside, maps or rows; the fault lies elsewhere."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Grow(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Rows(nn.Module):
    """[N, C, H, W] -> [N, H x W, C]"""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(x.flatten(2).mT)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.block, self.middle = nn.Conv2d(3, WIDTH, 3), Block(), Block()
        self.side, self.grow, self.outlet = Rows(), Grow(), nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x):
        x = self.middle(torch.tanh(self.block(self.inlet(x))))
        rows = torch.tanh(self.side(x)).mT.unflatten(2, x.shape[2:])
        return self.outlet(torch.tanh(self.grow(x + rows)))


class Kernel(nn.Module):
    """Kept as [k, k, in, out]."""

    def __init__(self, layer, bent=False):
        super().__init__()
        weight = layer.weight if layer.weight.dim() == 4 else layer.weight[:, :, None, None]
        self.kernel = nn.Parameter(weight.detach().permute(2, 3, 1, 0).contiguous())
        self.bias, self.bent = nn.Parameter(layer.bias.detach().clone()), bent

    def forward(self, x):
        kernel = self.kernel.permute(3, 2, 0, 1)
        padding = kernel.shape[-1] // 2
        return F.conv2d(torch.tanh(x) if self.bent else x, kernel, self.bias, padding=padding)


class Around(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.inner = nn.Sequential(Kernel(block.first), Kernel(block.second, bent=True))

    def forward(self, x):
        return x + self.inner(x)


class Port(nn.Module):
    def __init__(self, old, fault="", around=True):
        super().__init__()
        self.start = nn.Conv2d(3, WIDTH, 3)
        self.start.load_state_dict(old.inlet.state_dict())
        block, middle = map(Around if around else deepcopy, (old.block, old.middle))
        self.body = nn.Sequential(block, nn.Tanh(), middle)
        mode = "bilinear" if fault == "bilinear" else "nearest"
        self.beside = Kernel(old.side.proj)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), Kernel(old.grow.conv))
        self.end = Kernel(old.outlet)

    def forward(self, x):
        x = self.body(self.start(x))
        return self.end(torch.tanh(self.up(x + torch.tanh(self.beside(x)))))


@pytest.mark.parametrize("around", [True, False], ids=["skips and rows", "rows alone"])
@pytest.mark.parametrize("fault", ["", "bilinear"])
def test_a_fault_behind_them_is_not_laid_on_them(fault, around):
    torch.manual_seed(1)
    batches = [(torch.randn(2, 3, 8, 10), torch.randint(3, (2, 12, 16))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Port(old, fault, around), batches, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, "grow")
