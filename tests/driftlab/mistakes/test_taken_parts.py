"""Parts that begin elsewhere: as large as they were, of the same value, and by a naive second writing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.taken_parts import cut_elsewhere
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
MOVED = {"one earlier": -1, "one later": 1, "two earlier": -2, "two later": 2}


def mutants(function, *args):
    return {words: make() for words, make in cut_elsewhere(Call(function, args, {}), [])}


@settings(deadline=None)
@given(st.integers(2, 9), st.data())
def test_a_slice_is_moved_within_its_axis(size, data):
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    x = torch.arange(3 * size).view(3, size).float()
    wanted = {f"a slice {w}": range(start + by, stop + by) for w, by in MOVED.items()}
    wanted["a slice from the other end"] = range(size - stop, size - start)
    wanted = {w: r for w, r in wanted.items() if r[0] >= 0 and r[-1] < size and r[0] != start}
    found = mutants(torch.Tensor.__getitem__, x, (slice(None), slice(start, stop)))
    assert found.keys() == wanted.keys()
    assert all(found[w].tolist() == [[row[i].item() for i in r] for row in x] for w, r in wanted.items())


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_one_part_of_several_is_moved(sizes):
    x = torch.arange(2 * sum(sizes)).view(2, -1).float()
    found = mutants(torch.split, x, sizes, 1)
    whole, total = torch.split(x, sizes, 1), sum(sizes)
    for words, parts in found.items():
        at, by = int(words.split()[1]) - 1, next(by for w, by in MOVED.items() if words.endswith(w))
        start = sum(sizes[:at]) + by
        assert parts[at].tolist() == [[row[i].item() for i in range(start, start + sizes[at])] for row in x]
        assert all(torch.equal(parts[i], whole[i]) for i in range(len(sizes)) if i != at)
    moves = [(sum(sizes[:at]) + by, n) for at, n in enumerate(sizes) for by in MOVED.values()]
    assert len(found) == sum(begin >= 0 and begin + n <= total for begin, n in moves)


class Bands(nn.Module):
    """Each band of an uneven spectrum by a layer of its own (band-split networks; Luo and Yu, 2022)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(n, 5) for n in (2, 4, 3))

    def forward(self, x):
        return sum(f(part).tanh() for f, part in zip(self.inner, x.split([2, 4, 3], -1), strict=True))


class Turning(nn.Module):
    """What both directions of a recurrent layer come to, the one turned back."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4, bidirectional=True, batch_first=True)

    def forward(self, x):
        out, _ = self.lstm(x)
        return out[..., :4] + out[..., 4:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bands, self.turning, self.head = Bands(), Turning(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.turning(self.bands(x)) * torch.arange(6)[:, None]).mean(1))


class Flat(FlatPort):
    """Each band by its numbers; each direction by steps."""

    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.bands_at = [[0, 1], [1, 2, 3, 4] if fault == "band" else [2, 3, 4, 5], [6, 7, 8]]

    def read(self, x, suffix):
        w = {
            n: getattr(self, f"turning_lstm_{n}_l0{suffix}")
            for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        h = c = x.new_zeros(len(x), 4)
        made = []
        for step in x.unbind(1):
            i, f, g, o = (step @ w["weight_ih"].T + h @ w["weight_hh"].T + w["bias_ih"] + w["bias_hh"]).chunk(
                4, -1
            )
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            made.append(h)
        return torch.stack(made, 1)

    def forward(self, x):
        x = sum(self.linear(f"bands_inner_{i}", x[..., at]).tanh() for i, at in enumerate(self.bands_at))
        back = self.read(x.flip(1), "_reverse")
        x = self.read(x, "") + (back if self.fault == "turn" else back.flip(1))
        return self.linear("head", (x * torch.arange(6)[:, None]).mean(1))


@pytest.mark.parametrize(("fault", "module"), [("band", "bands"), ("turn", "turning.lstm"), ("", None)])
def test_who_takes_it_is_named_and_of_one_direction_the_layer(fault, module):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 6, 9), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)
    assert found.verdict is (Verdict.BUG if module else Verdict.ROUND_OFF)
    assert found.where is None if module is None else found.where.module == module
