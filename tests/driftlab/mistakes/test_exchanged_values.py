"""Two values that a module makes alike, each in the other's place; maps that are resized otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.resized import resized_otherwise
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 5


class Composer(nn.Module):
    """Of two children's states (Tai et al., binary tree LSTM, 2015)."""

    def __init__(self):
        super().__init__()
        self.own, self.left, self.right = (nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, one, other):
        both = torch.cat([one, other], -1)
        left, right = self.left(both).sigmoid(), self.right(both).sigmoid()
        return self.own(both).tanh() + left * one + right * other


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.speed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        angle = self.speed(x)
        return x * angle.sin() + x.square() * angle.cos()


class Net(nn.Module):
    """[N, 4, C] -> classes; the same composer twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.composer, self.waves, self.head = Composer(), Waves(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        one, other, more, last = x.unbind(1)
        top = self.composer(self.composer(one, other), self.composer(more, last))
        return self.head(self.waves(top))


class Flat(FlatPort):
    def composed(self, one, other):
        both = torch.cat([one, other], -1)
        own, left, right = (self.linear(f"composer_{name}", both) for name in ("own", "left", "right"))
        left, right = (right, left) if self.fault == "gates" else (left, right)
        return own.tanh() + torch.sigmoid(left) * one + torch.sigmoid(right) * other

    def forward(self, x):
        x = self.composed(x[:, ::2].flatten(0, 1), x[:, 1::2].flatten(0, 1)).unflatten(0, (-1, 2))
        x = self.composed(x[:, 0], x[:, 1])
        angle = self.linear("waves_speed", x)
        sin, cos = (angle.cos(), angle.sin()) if self.fault == "waves" else (angle.sin(), angle.cos())
        return self.linear("head", x * sin + x * x * cos)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("gates", "composer", "two of `sigmoid`, each in the other's place"),
        ("waves", "waves", "`sin` and `cos`, each in the other's place"),
        ("", None, ""),
    ],
)
def test_who_makes_both_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(6, 4, WIDTH), torch.randint(3, (6,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)
    assert found.verdict is (Verdict.BUG if fault else Verdict.ROUND_OFF)
    assert found.where is None if module is None else found.where.module == module
    assert words in " ".join(str(found).split())


SIZE = {"size": (7, 9)}


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"mode": "nearest"}, [{"mode": "bilinear", "align_corners": c} for c in (False, True)]),
        ({"mode": "bilinear"}, [{"mode": "bilinear", "align_corners": True}, {"mode": "nearest"}]),
        (
            {"mode": "bicubic", "align_corners": True},
            [{"mode": "bicubic", "align_corners": False}, {"mode": "nearest"}],
        ),
    ],
)
def test_a_map_is_resized_in_each_other_way(settings, others):
    x = torch.randn(2, 3, 4, 5)
    made = [make() for _, make in resized_otherwise(Call(F.interpolate, (x,), SIZE | settings), [])]
    wanted = [F.interpolate(x, **SIZE, **other) for other in others]
    assert len(made) == len(wanted)
    assert all(map(torch.equal, made, wanted))


def test_a_map_is_sampled_in_each_other_way():
    x, grid = torch.randn(2, 3, 4, 5), 3 * torch.rand(2, 6, 7, 2) - 1.5
    call = Call(F.grid_sample, (x, grid), {"padding_mode": "border", "align_corners": False})
    made = {words: make() for words, make in resized_otherwise(call, [])}
    own = {"mode": "bilinear", "padding_mode": "border", "align_corners": False}
    changes = {
        "`grid_sample` with aligned corners": {"align_corners": True},
        "`grid_sample` by `nearest`": {"mode": "nearest"},
        "`grid_sample` with the border `zeros`": {"padding_mode": "zeros"},
        "`grid_sample` with the border `reflection`": {"padding_mode": "reflection"},
    }
    assert made.keys() == changes.keys()
    assert all(torch.equal(made[w], F.grid_sample(x, grid, **(own | c))) for w, c in changes.items())
