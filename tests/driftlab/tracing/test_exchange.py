"""The value that makes the candidate's results of the reference's, and the modules that come by it."""

import torch
from torch import nn

from driftlab.arithmetic.passes import Recorded
from driftlab.tracing.exchange import exchanged
from driftlab.tracing.running import Again

WIDTH = 5


class Net(nn.Module):
    """[N, WIDTH] -> [N, 3]; ``way`` is how each of the layers is followed."""

    def __init__(self, *way):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.way = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), way
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer, after in zip(self.layers, self.way, strict=True):
            x = after(layer(x))
        return self.head(x)


class Slopes(Net):
    """[N, WIDTH] -> [N, 3], and the slope of its sum."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = super().forward(x)
            return y, torch.autograd.grad(y.sum(), x)[0]


class Reader(nn.Module):
    """[T, N, WIDTH] -> the two states of a cell, of each sample as they are at a time of its own."""

    def __init__(self, at):
        super().__init__()
        self.cell, self.at = nn.LSTMCell(WIDTH, WIDTH), at

    def forward(self, x):
        states = [(x[0], torch.zeros_like(x[0]))]
        for now in x:
            states.append(self.cell(now, states[-1]))
        return [torch.stack([states[at][which][n] for n, at in enumerate(self.at)]) for which in (0, 1)]


class ReadAndTell(nn.Module):
    """[T, N, WIDTH] -> [N, WIDTH]: a second cell goes on with both states."""

    def __init__(self, *at):
        super().__init__()
        torch.manual_seed(0)
        self.reader, self.teller = Reader(at), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        return self.teller(x[0], self.reader(x))[0]


def between(mine, theirs, x):
    def agrees(results, among):
        return all(torch.allclose(results[name], wanted[name], rtol=1e-9, atol=1e-12) for name in among)

    both = [Again(network, Recorded((x,)), "float64", "forward", 0) for network in (mine, theirs)]
    wanted = both[1].results({})
    return exchanged(*both, agrees)


def test_the_first_value_that_does_tells_the_module():
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    wave = between(Net(*3 * [torch.tanh]), Net(torch.tanh, torch.sin, torch.tanh), x)
    assert (wave.scope, wave.candidate_scope) == ("", "")
    assert wave.users == {"layers.2"}


def test_a_slope_on_the_way_follows_what_a_value_is_computed_by_and_is_not_compared():
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    wave = between(Slopes(*3 * [torch.tanh]), Slopes(torch.tanh, torch.sin, torch.tanh), x)
    assert wave.users == {"layers.2"}


def test_a_result_by_itself_tells_nothing_of_the_modules_before_it():
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    steps = [torch.tanh, torch.tanh, torch.tanh]

    class OneByOne(Net):  # which has no value between the first and the last of the reference's size
        def forward(self, x):
            return torch.cat([super(OneByOne, self).forward(row) for row in x.split(1)])

    assert between(Net(*steps), OneByOne(torch.sin, torch.tanh, torch.sin), x) is None


def test_what_is_there_in_parts_alone_lies_between():
    x = torch.linspace(-1, 1, 3 * 2 * WIDTH).view(3, 2, WIDTH)
    later = between(ReadAndTell(2, 1), ReadAndTell(3, 3), x)
    assert later.scope == "teller"  # both states are wrong, and first come together there
    assert "reader" in later.scopes
