"""Mistakes that nobody has a name for: the candidate's value, put into the reference, tells the place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH, TOKENS = 6, 5
SHUFFLED = [4, 0, 5, 2, 1, 3]


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scores, self.values = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 1),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        x = self.norm(x)
        return self.scores(x).softmax(1) * torch.tanh(self.values(x))


class Net(nn.Module):
    """[N, T, C] -> [N, 3]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.mixers = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x.mean(1))


class Port(nn.Module):
    """Of weights without modules."""

    def __init__(self, old, fault=""):
        super().__init__()
        self.fault = fault
        for name, parameter in old.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))


class TimeFirst(Port):
    """The same with [T, N, C] inside, of weights without modules; ``fault`` stands in the second mixer."""

    def linear(self, name, x):
        return F.linear(x, getattr(self, name + "_weight"), getattr(self, name + "_bias"))

    def mixer(self, i, x, fault):
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        x = (x - mean) * (spread + 1e-5).rsqrt()
        x = x * getattr(self, f"mixers_{i}_norm_weight") + getattr(self, f"mixers_{i}_norm_bias")
        if fault == "wave in the norm":
            x = x + 0.1 * torch.sin(3 * x)
        scores, values = self.linear(f"mixers_{i}_scores", x), self.linear(f"mixers_{i}_values", x)
        shares = scores.softmax(0)
        if fault == "squares in the shares":
            shares = shares * shares / (shares * shares).sum(0)
        if fault == "shuffled":
            values = values[..., SHUFFLED]
        return shares * torch.tanh(values)

    def forward(self, x):
        x = self.linear("enter", x.transpose(0, 1))
        for i in range(3):
            x = x + self.mixer(i, x, self.fault if i == 1 else "")
        return self.linear("head", x.mean(0))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.new = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, state):
        share = torch.sigmoid(self.kept(state))
        return share * state + (1 - share) * torch.tanh(self.new(torch.cat([x, state], -1)))


class Recurrent(nn.Module):
    """[N, T, C] -> [N, 3]: one cell is called at each time, and its norm each time for what comes and is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.cell, self.head = nn.LayerNorm(WIDTH), Cell(), nn.Linear(WIDTH, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        state = x[:, 0]
        for time in range(1, TOKENS):
            state = self.cell(self.norm(x[:, time]), self.norm(state))
        return self.head(state)


class RecurrentTimeFirst(Port):
    """The same of weights without modules, [C, N] inside."""

    def norm(self, x):
        spread, mean = torch.var_mean(x, 0, correction=0, keepdim=True)
        x = (x - mean) * (spread + 1e-5).rsqrt()
        if self.fault == "wave in the norm":
            x = x + 0.1 * torch.sin(3 * x)
        return x * self.norm_weight[:, None] + self.norm_bias[:, None]

    def forward(self, x):
        first, *others = x.permute(1, 2, 0)
        state = first
        for now in others:
            now, state = self.norm(now), self.norm(state)
            share = torch.sigmoid(self.cell_kept_weight @ state + self.cell_kept_bias[:, None])
            if self.fault == "squares in the share":
                share = share * share / (share * share).mean(0)
            new = self.cell_new_weight @ torch.cat([now, state]) + self.cell_new_bias[:, None]
            new = torch.tanh(new)
            if self.fault == "shuffled":
                new = new[SHUFFLED]
            state = state + (1 - share) * (new - state)
        return F.linear(state.T, self.head_weight, self.head_bias)


class Asked(nn.Module):
    """[N, T, C] -> [N, 3]: what is asked is learned, and mixed before anything is seen of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.mixers, self.head = nn.ModuleList([Mixer()]), nn.Linear(WIDTH, 3)

    def forward(self, x):
        queries = self.queries + self.mixers[0](self.queries)
        return self.head((torch.tanh(x @ queries.mT) @ queries).mean(1))


class AskedTimeFirst(TimeFirst):
    def forward(self, x):
        queries = self.queries.transpose(0, 1)
        queries = (queries + self.mixer(0, queries, self.fault))[:, 0]
        answers = torch.einsum("tnq,qc->tnc", torch.tanh(x.transpose(0, 1) @ queries.T), queries)
        return self.linear("head", answers.mean(0))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, TOKENS, WIDTH), torch.randint(3, (8,))) for _ in range(2)]


def judged(fault, network=Net, port=TimeFirst):
    return diagnose(network(), lambda old: port(old, fault), batches(), loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("wave in the norm", "mixers.1"),
        ("squares in the shares", "mixers.1"),
        ("shuffled", "mixers.1"),
    ],
)
def test_the_module_is_named(fault, module):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == (module, "forward")


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("wave in the norm", "norm"),
        ("squares in the share", "cell"),
        ("shuffled", "cell"),
    ],
)
def test_so_it_is_where_it_is_made_at_each_time_of_a_loop(fault, module):
    found = judged(fault, Recurrent, RecurrentTimeFirst)
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == (module, "forward")


@pytest.mark.parametrize("fault", ["wave in the norm", "squares in the shares", "shuffled"])
def test_so_it_is_of_what_is_made_of_weights_alone(fault):
    found = judged(fault, Asked, AskedTimeFirst)
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == ("mixers.0", "forward")


@pytest.mark.parametrize(
    ("network", "port"), [(Net, TimeFirst), (Recurrent, RecurrentTimeFirst), (Asked, AskedTimeFirst)]
)
def test_without_a_fault_they_are_the_same(network, port):
    assert judged("", network, port).verdict is Verdict.ROUND_OFF
