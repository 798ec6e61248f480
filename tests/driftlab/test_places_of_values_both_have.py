"""Values that both networks have: with something done to them besides, of another turn, in another order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Gain(nn.Module):
    """A norm over the channels, of no kind that torch has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return x / x.abs().mean(1, keepdim=True) * self.weight[:, None, None]


class Stage(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.mix, self.norm = nn.Conv2d(inputs, WIDTH, 1), Gain()

    def forward(self, x):
        return self.norm(self.mix(x))


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.filter(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Reader(nn.Module):
    """Pictures -> classes, and the maps of both stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stages, self.grown = nn.ModuleList([Stage(3), Stage(WIDTH)]), Grown()
        self.step, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        maps = [x := stage(x) for stage in self.stages]
        rows, state = self.grown(x).mean(3), 0.1 * maps[0].mean((2, 3))
        for t in range(rows.shape[2]):
            state = self.step(rows[:, :, t], state)
        return self.head(state), maps


class FlatReader(FlatPort):
    def forward(self, x):
        maps = []
        for i in range(2):
            y = torch.einsum("nchw,dc->ndhw", x, getattr(self, f"stages_{i}_mix_weight")[:, :, 0, 0])
            y = y + getattr(self, f"stages_{i}_mix_bias")[:, None, None]
            x = y * getattr(self, f"stages_{i}_norm_weight")[:, None, None] / y.abs().mean(1, keepdim=True)
            if i == 0 and self.fault == "bent":
                x = F.softplus(x)
            maps.append(x)
        tiled = x.repeat(1, 1, 2, 2) if self.fault == "tiled" else None
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3) if tiled is None else tiled
        x = F.conv2d(x, self.grown_filter_weight, self.grown_filter_bias, padding=1)
        rows, state = x.mean(3), 0.1 * maps[0].mean((2, 3))
        weights = [getattr(self, f"step_{kind}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        for row in rows.unbind(2)[: -1 if self.fault == "a step missing" else None]:
            state = torch.gru_cell(row, state, *weights)
        return self.linear("head", state), maps


def loss(outputs, labels):
    logits, maps = outputs
    return F.cross_entropy(logits, labels) + 0.1 * sum(one.square().mean() for one in maps)


def judged(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 3, 4, 5), torch.randint(3, (4,))) for _ in range(2)]
    return diagnose(Reader(), lambda old: FlatReader(old, fault), batches, loss=loss, steps=2)


@pytest.mark.parametrize(
    ("fault", "module"), [("bent", "stages.0.norm"), ("tiled", "grown"), ("a step missing", "")]
)
def test_the_place_is_whose_affair_it_is(fault, module):
    """Bent before it is a result as well: by its maker. Another state taken: by who goes on with it."""
    found = judged(fault)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)


def test_the_same_values_in_other_code_are_no_fault():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
