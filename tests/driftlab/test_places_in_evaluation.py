"""What is wrong in evaluation alone: training tells where."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, LENGTH = 6, 7


class Enter(nn.Module):
    """Numbers in time, and what goes with them, as rows of one width; some are hidden."""

    def __init__(self):
        super().__init__()
        self.value, self.hidden = nn.Linear(LENGTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, more, mask):
        rows = self.value(torch.cat([x, more], 1))
        mask = F.pad(mask, (0, more.shape[1]))
        return torch.where(mask[..., None], self.hidden, rows)


class Turning(nn.Module):
    def forward(self, rows):
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * torch.tensor([0.7, 0.3, 0.1])
        return angles.cos(), angles.sin()


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin):
        q, k, v = self.fused(x).chunk(3, -1)
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        return x + self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)


class Reader(nn.Module):
    """Rows, some of them hidden, and more rows -> numbers and what the first rows became."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.turning = Enter(), Turning()
        self.looks, self.head = nn.ModuleList([Look(), Look()]), nn.Linear(WIDTH, LENGTH)

    def forward(self, x, more, mask):
        rows = self.enter(x, more, mask)
        turned = self.turning(rows.shape[1])
        for look in self.looks:
            rows = look(rows, *turned)
        return self.head(rows[:, : x.shape[1]])


class FlatReader(FlatPort):
    """Rotates by complex numbers; each fault is in evaluation alone."""

    def forward(self, x, more, mask):
        fault = "" if self.training else self.fault
        rows = self.linear("enter_value", x)
        if fault != "the other rows left out":
            rows = torch.cat([rows, self.linear("enter_value", more)], 1)
        if fault != "nothing hidden":
            hidden = F.pad(mask, (0, rows.shape[1] - mask.shape[1])).to(rows)[..., None]
            rows = rows * (1 - hidden) + hidden * self.enter_hidden
        places = torch.arange(rows.shape[1]).to(rows)
        if fault == "positions slow down":
            places = torch.where(places > 3, 3 + (places - 3) / 2, places)
        angles = places[:, None] * torch.tensor([0.7, 0.3, 0.1]).to(rows)
        turn = torch.polar(torch.ones_like(angles), angles)
        for i in range(2):
            q, k, v = self.linear(f"looks_{i}_fused", rows).chunk(3, -1)
            q, k = (torch.complex(*t.chunk(2, -1)) * turn for t in (q, k))
            scores = torch.einsum("bqd,bkd->bqk", q, k.conj()).real / WIDTH**0.5
            rows = rows + self.linear(f"looks_{i}_out", scores.softmax(-1) @ v)
        return self.linear("head", rows[:, : x.shape[1]])


def judged(fault):
    torch.manual_seed(1)
    inputs = [
        (torch.randn(3, 4, LENGTH), torch.randn(3, 2, LENGTH), torch.arange(12).reshape(3, 4) % 3 == 0)
        for _ in range(2)
    ]
    batches = [(one, torch.randn(3, 4, LENGTH)) for one in inputs]
    return diagnose(Reader(), lambda old: FlatReader(old, fault), batches, loss=F.mse_loss, steps=2)


@pytest.mark.parametrize(
    ("fault", "module"),
    [("nothing hidden", "enter"), ("the other rows left out", "enter"), ("positions slow down", "turning")],
)
def test_the_place_makes_what_evaluation_alone_lacks(fault, module):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert (found.where.pass_, found.where.module) == ("eval", module)


def test_the_same_function_in_other_code_is_no_fault():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


class Noisy(nn.Module):
    """Linear, with noise on its weights in training (Fortunato et al., 2018), held as it was drawn."""

    def __init__(self, width):
        super().__init__()
        self.mean, self.spread = (nn.Parameter(torch.randn(width, WIDTH) * s) for s in (0.4, 0.1))
        self.register_buffer("noise", torch.randn(width, WIDTH))

    def forward(self, x):
        return F.linear(x, self.mean + self.spread * self.noise if self.training else self.mean)


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.worth, self.gain = Noisy(WIDTH), Noisy(1), Noisy(5)

    def forward(self, x):
        x = self.enter(x).relu()
        gain = self.gain(x)
        return self.worth(x) + gain - gain.mean(1, keepdim=True)


class FlatDueling(FlatPort):
    def __init__(self, old, fault):
        super().__init__(old, fault)
        for name, buffer in old.named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer.clone())

    def noisy(self, name, x):
        y = x @ getattr(self, name + "_mean").T
        if not self.training and self.fault != name:
            return y
        return y + x @ (getattr(self, name + "_spread") * getattr(self, name + "_noise")).T

    def forward(self, x):
        x = self.noisy("enter", x).clamp(min=0)
        gain = self.noisy("gain", x)
        return self.noisy("worth", x) + (gain - gain.mean(1, keepdim=True))


@pytest.mark.parametrize("fault", ["worth", "gain", "enter"])
def test_a_module_that_trains_in_evaluation(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(4, WIDTH), torch.randn(4, 5)) for _ in range(2)]
    found = diagnose(Dueling(), lambda old: FlatDueling(old, fault), batches, loss=F.mse_loss, steps=2)
    assert (found.verdict, found.where.pass_, found.where.module) == (Verdict.BUG, "eval", fault)
