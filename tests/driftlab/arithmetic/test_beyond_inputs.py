"""On inputs that no batch holds a difference counts that float32 could show, and no smaller one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)


class Enter(nn.Linear):
    pass


class EnterOtherwise(nn.Linear):
    off = 0.0

    def forward(self, x):
        return super().forward(x) * (1 + self.off * (x.abs() > 8).any())


def judged(off, dtype):
    def rewritten(model):
        other = EnterOtherwise(6, 5, dtype=dtype)
        other.load_state_dict(model[0].state_dict())
        other.off = off
        return nn.Sequential(other, *model[1:])

    torch.manual_seed(0)
    model = nn.Sequential(Enter(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    batches = [(torch.randn(8, 6, dtype=dtype), torch.randint(3, (8,))) for _ in range(3)]
    return diagnose(model, rewritten, batches, loss=F.cross_entropy)


@pytest.mark.parametrize(
    ("off", "dtype", "verdict"),
    [
        (1e-9, torch.float32, Verdict.ROUND_OFF),
        (1e-6, torch.float32, Verdict.BUG),
        (1e-9, torch.float64, Verdict.BUG),
    ],
    ids=str,
)
def test_what_no_training_could_show_is_none(off, dtype, verdict):
    found = judged(off, dtype)
    assert found.verdict in ({verdict, Verdict.BIT_IDENTICAL} if verdict is Verdict.ROUND_OFF else {verdict})
    if verdict is Verdict.BUG:
        assert "eight times as large" in found.headline
