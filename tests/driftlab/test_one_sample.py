"""torch's batch norm, one sample, on a CPU: its gradients are wrong where the result is read as tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)


class Pixels(nn.Module):
    """[N, 3, 4, 4] -> [N, 2]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.sin(self.norm(self.conv(x))).mean((2, 3)))


class Tokens(Pixels):
    def forward(self, x):
        return self.head(torch.sin(self.norm(self.conv(x)).flatten(2).mT).mean(1))


def is_right(samples):
    """By finite differences of torch's own."""
    network = Tokens().double()
    network.norm.track_running_stats = False
    x = torch.randn(samples, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(network, (x,), raise_exception=False)


@pytest.mark.parametrize("samples", [1, 2])
def test_what_is_said_of_one_sample_is_what_finite_differences_say(samples):
    reference = Pixels()
    candidate = Tokens()
    candidate.load_state_dict(reference.state_dict())
    torch.manual_seed(1)
    batches = [(torch.randn(samples, 3, 4, 4), torch.randint(2, (samples,))) for _ in range(2)]
    found = diagnose(reference, candidate, batches, loss=F.cross_entropy, steps=2)
    right = all(is_right(n) for n in range(1, samples + 1))
    assert (found.verdict is Verdict.BUG) == (not right)
    assert ("the candidate gives what the other does" in found.headline) == (not right)
