"""A value that both networks have in another order, or that a module is given in place of another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 4


class Merge(nn.Module):
    """[N, H, W, C] -> [N, H / 2, W / 2, 2 C], odd sides padded at their ends."""

    def __init__(self):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * WIDTH, 2 * WIDTH, bias=False), nn.LayerNorm(2 * WIDTH)

    def forward(self, x):
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        quarters = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.norm(self.reduction(torch.cat(quarters, -1)))


class Pool(nn.Module):
    """Of each sample the mean over as many places as it asks for."""

    def forward(self, x, sizes):
        order = sizes.argsort(stable=True)
        made = torch.stack([x[i, : sizes[i]].mean(0) for i in order])
        return made[order.argsort()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.merge, self.pool = nn.Conv2d(3, WIDTH, 3, padding=1), Merge(), Pool()
        self.inner, self.head = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 3)

    def forward(self, x, sizes):
        x = self.merge(torch.tanh(self.inlet(x)).movedim(1, 3))
        return self.head(torch.tanh(self.inner(self.pool(x.flatten(1, 2), sizes))))


class Flat(FlatPort):
    def forward(self, x, sizes):
        x = torch.tanh(F.conv2d(x, self.inlet_weight, self.inlet_bias, padding=1))
        below, right = (n % 2 for n in x.shape[2:])
        at_ends = self.fault != "near sides"
        x = F.pad(x, (0, right, 0, below) if at_ends else (right, 0, below, 0))
        kernel = self.merge_reduction_weight.unflatten(1, (2, 2, WIDTH)).permute(0, 3, 2, 1)
        x = F.conv2d(x, kernel, stride=2).flatten(2).mT
        x = F.layer_norm(x, (2 * WIDTH,), self.merge_norm_weight, self.merge_norm_bias)
        order = sizes.argsort(stable=True)
        used = torch.arange(x.shape[1]) < sizes[order, None]
        made = (x[order] * used[..., None]).sum(1) / sizes[order, None]
        made = made[order if self.fault == "rows" else order.argsort()]
        return self.linear("head", torch.tanh(self.linear("inner", made)))


@pytest.mark.parametrize(("fault", "module"), [("", None), ("near sides", "merge"), ("rows", "pool")])
def test_the_place_is_where_it_got_its_order(fault, module):
    torch.manual_seed(1)
    sizes = torch.tensor([9, 4, 7, 2, 5])
    batches = [((torch.randn(5, 3, 5, 7), sizes), torch.randint(3, (5,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)


class Branches(nn.Module):
    """Each adds to what the one before it left."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=2**k, dilation=2**k), nn.Tanh()) for k in (0, 1)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Conv1d(3, WIDTH, 3), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x.mean(2))


class FlatDeep(FlatPort):
    def forward(self, x):
        x = F.conv1d(x, self.inlet_weight, self.inlet_bias)
        for i in range(3):
            entered = x
            for k in (0, 1):
                weight, bias = (getattr(self, f"blocks_{i}_layers_{k}_0_{n}") for n in ("weight", "bias"))
                read = entered if self.fault == "beside" and i == 1 else x
                x = x + torch.tanh(F.conv1d(read, weight, bias, padding=2**k, dilation=2**k))
            x = torch.tanh(x)
        return self.linear("head", x.mean(2))


@pytest.mark.parametrize(("fault", "module"), [("", None), ("beside", "blocks.1")])
def test_what_a_module_is_given_is_chosen_by_who_sees_both(fault, module):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 3, 12), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Deep(), lambda old: FlatDeep(old, fault), batches, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
