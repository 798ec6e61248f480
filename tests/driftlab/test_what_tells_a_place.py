"""Each place says what told it, so that the reader knows how far to trust it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Place, Verdict, diagnose
from driftlab.words import ToldBy
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class FlatTower(FlatPort):
    """The same in one forward."""

    def forward(self, x):
        for k in range(3):
            here = self.fault if k == 1 else ""
            weight, bias = (getattr(self, f"blocks_{k}_norm_{kind}") for kind in ("weight", "bias"))
            normed = F.layer_norm(x, (WIDTH,), weight, None if here == "bias left out" else bias)
            inner = self.linear(f"blocks_{k}_fc", normed)
            bent = torch.tanh(inner)
            if here == "one of a kind":
                bent = bent + 0.1 * torch.sin(3 * normed.flip(0)) * bent.roll(1, 1)
            x = x + bent
        return self.linear("out", x)


def batches():
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, WIDTH, generator=numbers), torch.randint(0, 3, (6,), generator=numbers))
        for _ in range(3)
    ]


def scaled(network):
    """The same modules by the same names, of which one is another."""
    new = copy.deepcopy(network)
    new.blocks[1].fc.register_forward_hook(lambda module, given, result: 1.1 * result)
    return new


def words(found):
    """Without the line breaks of the table."""
    return " ".join(str(found).split())


@pytest.mark.parametrize(
    ("fault", "module", "told_by"),
    [("bias left out", "blocks.1.norm", ToldBy.CHANGE), ("one of a kind", "blocks.1", ToldBy.VALUE)],
)
def test_in_flat_code_one_change_tells_it_or_one_value(fault, module, told_by):
    found = diagnose(Tower(), lambda network: FlatTower(network, fault), batches())
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.told_by) == (module, told_by)
    assert told_by.says in words(found)
    assert Place.from_dict(found.where.as_dict()) == found.where


def test_of_modules_that_stand_for_each_other_their_calls_tell_it():
    found = diagnose(Tower(), scaled, batches())
    assert (found.where.module, found.where.told_by) == ("blocks.1.fc", ToldBy.CALLS)
    assert ToldBy.CALLS.says in words(found)


def test_a_place_that_was_stored_before_that_is_read_as_one_that_nothing_told():
    stored = {"module": "fc", "pass": "forward", "step": 0}
    assert Place.from_dict(stored).told_by is None
    assert "told_by" not in Place.from_dict(stored).as_dict()
