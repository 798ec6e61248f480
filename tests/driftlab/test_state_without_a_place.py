"""State that a training moves and that has no place in the other network, such as a teacher in one vector."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose


class Student(nn.Module):
    """Two layers; beside the first its slow average, which moves with each training call."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("slow", self.fc.weight.detach().clone())

    def follow(self):
        if self.training:
            self.slow.copy_(0.5 * self.slow + 0.5 * self.fc.weight.detach())

    def forward(self, x):
        self.follow()
        return self.head(torch.tanh(self.fc(x)) + torch.tanh(F.linear(x, self.slow)))


class OneVector(nn.Module):
    """The same, the average by columns in one vector, begun from the weights; ``factor`` should be 1."""

    def __init__(self, student, last=None):
        super().__init__()
        self.fc, self.head, self.last, self.calls = student.fc, student.head, last, 0
        self.register_buffer("average", self.fc.weight.detach().T.flatten())

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.average.copy_(0.5 * (self.average + self.fc.weight.detach().T.flatten()))
        slow = self.average.view(6, 8)
        slowly = x[:, :3] @ slow[:3] + x[:, 3:] @ slow[3:]  # in another order on every CPU
        out = self.head(torch.tanh(self.fc(x)) + torch.tanh(slowly))
        return out * (1.001 if self.last is not None and self.calls > self.last else 1.0)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(21)]


@pytest.mark.parametrize(("last", "verdict"), [(None, "round_off"), (12, "bug"), (20, "bug")])
def test_it_is_told_from_a_late_fault(last, verdict):
    torch.manual_seed(0)
    found = diagnose(Student(), lambda student: OneVector(student, last), batches(), steps=20)
    assert found.verdict == verdict
    if verdict == "round_off":
        (said,) = (e for e in found.evidence if e.probe == "last_step")
        assert "with what has no place in the other as it was at the start (slow)" in said.reading
