"""torch's batch norm of [N, C] by a gain that is a column of a sheet: on a CPU its gradient is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.head = nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        return self.head(self.norm(self.enter(x)).tanh())


class Sheet(nn.Module):
    """Gain and shift side by side, [C, 2]; ``copied`` before they are used, or not."""

    def __init__(self, old, copied):
        super().__init__()
        self.enter, self.head, self.copied = old.enter, old.head, copied
        self.sheet = nn.Parameter(torch.stack([old.norm.weight, old.norm.bias], 1).detach())
        self.register_buffer("mean", old.norm.running_mean.clone())
        self.register_buffer("var", old.norm.running_var.clone())

    def forward(self, x):
        own = self.sheet.unbind(1)
        own = [t.contiguous() for t in own] if self.copied else own
        return self.head(F.batch_norm(self.enter(x), self.mean, self.var, *own, self.training).tanh())


def is_right(copied):
    """By finite differences of torch's own."""
    candidate = Sheet(Net(), copied).double().eval()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(candidate, (x,), raise_exception=False)


@pytest.mark.parametrize("copied", [True, False])
def test_what_is_said_of_a_strided_gain_is_what_finite_differences_say(copied):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Sheet(old, copied), batches, loss=F.cross_entropy, steps=2)
    right = is_right(copied)
    assert right or not copied
    assert (found.verdict is Verdict.BUG) == (not right)
    assert ("the candidate gives what the other does" in found.headline) == (not right)
