"""What is made of time steps or positions may be looked up in a table that was made in float32 beforehand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

RIGHT = [Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL]  # the table's numbers are those of float32, to the bit


class Denoiser(nn.Module):
    """Predicts noise from points [N, 2] and time steps, whole numbers [N], as a diffusion model does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.time = nn.Linear(2, 32), nn.Linear(32, 32)
        self.mid, self.out = nn.Linear(32, 32), nn.Linear(32, 2)

    def embedded(self, t):
        rates = torch.exp(-math.log(10_000) * torch.arange(16) / 16)
        angles = t[:, None].float() * rates
        return torch.cat([angles.sin(), angles.cos()], 1).to(self.inp.weight.dtype)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(self.embedded(t)))
        return self.out(F.silu(self.mid(h)))


class Looked(Denoiser):
    def __init__(self, model, off=0.0, row=None):
        nn.Module.__init__(self)
        self.inp, self.time, self.mid, self.out = model.inp, model.time, model.mid, model.out
        table = model.embedded(torch.arange(1000)).detach() * (1 + off)
        if row is not None:
            table[row] = 0.0
        self.register_buffer("table", table, persistent=False)

    def embedded(self, t):
        return self.table[t]


def batches():
    generator = torch.Generator().manual_seed(1)
    x, noise = (torch.randn(32, 2, generator=generator) for _ in range(2))
    return [((x, torch.randint(1000, (32,), generator=generator)), noise)]


@pytest.mark.parametrize(
    ("wrong", "verdicts"),
    [({}, RIGHT), ({"off": 1e-4}, [Verdict.BUG]), ({"row": 3}, [Verdict.BUG])],
    ids=["right", "a factor", "a row"],
)
def test_a_table_of_time_steps_is_rounding_and_a_wrong_one_is_not(wrong, verdicts):
    given = batches()
    if "row" in wrong:
        given[0][0][1][0] = wrong["row"]
    found = diagnose(Denoiser(), lambda model: Looked(model, **wrong), given, F.mse_loss, steps=2)
    assert found.verdict in verdicts, found
