"""What stands behind the border: another filling of a padding is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.borders import bordered
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)


def test_all_fillings_but_its_own_are_tried():
    x = torch.randn(2, 3, 7)
    made = {words: make() for words, make in bordered(Call(F.pad, (x, (1, 2), "replicate"), {}), [])}
    assert len(made) == 3
    assert torch.equal(made["zeros behind the border"], F.pad(x, (1, 2)))
    assert torch.equal(made["the mirror image behind the border"], F.pad(x, (1, 2), mode="reflect"))


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.edge, self.first = nn.ReplicationPad1d(1), nn.Conv1d(2, 4, 3)
        self.second = nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(self.edge(x)).tanh()
        return self.head(self.second(x).tanh().mean(2))


class ByTaps(FlatPort):
    """Tap by tap, time first; ``fault`` is another filling of the first, or of the second."""

    def taps(self, name, x, mode):
        padded = F.pad(x.movedim(1, 2), (1, 1), mode).movedim(2, 1)
        weight, size = getattr(self, name + "_weight"), x.shape[1]
        taps = (padded[:, i : i + size] @ weight[..., i].T for i in range(3))
        return (sum(taps) + getattr(self, name + "_bias")).tanh()

    def forward(self, x):
        first = "reflect" if self.fault == "first" else "replicate"
        x = self.taps("first", x.movedim(1, 2), first)
        x = self.taps("second", x, "constant" if self.fault == "second" else "circular")
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [("first", "edge", "the mirror image behind"), ("second", "second", "zeros behind")],
)
def test_the_filling_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(5, 2, 9), torch.randint(3, (5,))) for _ in range(2)]
    found = diagnose(Smoothed(), lambda old: ByTaps(old, fault), batches, loss=F.cross_entropy, steps=3)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert any(words in e.details for e in found.evidence)
