"""Gradients stopped at each turn of a loop, where no one call is sent what is lacked; and a frozen weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Writer(nn.Module):
    """[N, T, C]; what it gave is fed to it at its next turn."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        state = fed = torch.zeros_like(x[:, 0])
        made = []
        for now in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat([now, fed, state], 1)))
            fed = torch.sin(self.out(state))
            made.append(fed)
        return torch.stack(made, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(4, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False)
        self.writer, self.head = Writer(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.tanh(self.norm(self.stem(x).mT).mT)
        return self.head(self.writer(x).mean(1))


class Flat(FlatPort):
    def __init__(self, old, fault):
        super().__init__(old, fault)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x):
        stem = self.stem_weight
        x = x @ (stem.detach() if self.fault == "frozen" else stem).T
        state = fed = torch.zeros_like(x[:, 0])
        made = []
        for now in torch.tanh(self.norm(x.mT).mT).unbind(1):
            fed = fed.detach() if self.fault == "fed" else fed
            state = torch.tanh(self.linear("writer_cell", torch.cat([now, fed, state], 1)))
            fed = torch.sin(self.linear("writer_out", state))
            made.append(fed)
        return self.linear("head", torch.stack(made).mean(0))


def judged(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 5, 4), torch.randint(3, (4,))) for _ in range(2)]
    return diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)


def test_what_is_fed_back_without_gradient_is_found_in_the_loop():
    found = judged("fed")
    assert (found.verdict, found.where.module) == (Verdict.BUG, "writer")
    assert "detached there at each of 4 calls, would do that" in " ".join(str(found).split())


def test_a_frozen_weight_is_said_of_the_module_that_owns_it():
    found = judged("frozen")
    assert (found.verdict, found.where.module) == (Verdict.BUG, "stem")


def test_another_form_of_the_loop_is_right():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


class Shared(nn.Module):
    """Two layers that are called in turn, over and over."""

    def __init__(self):
        super().__init__()
        self.group = nn.Sequential(Mixing(), Mixing())

    def forward(self, x):
        for _ in range(3):
            x = self.group(x)
        return x


class Rounds(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.encoder, self.head = nn.Linear(4, WIDTH), Shared(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.encoder(self.stem(x)))


class FlatRounds(FlatPort):
    def forward(self, x):
        x = self.linear("stem", x)
        for turn in range(3):
            x = x.detach() if self.fault and turn == 2 else x
            for i in range(2):
                x = x + torch.tanh(self.linear(f"encoder_group_{i}_mix", x))
        return self.linear("head", x)


def test_what_is_stopped_at_one_call_of_several_is_who_calls():
    torch.manual_seed(1)
    batches = [(torch.randn(4, 4), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(
        Rounds(), lambda old: FlatRounds(old, "cut"), batches, loss=nn.functional.cross_entropy, steps=2
    )
    assert (found.verdict, found.where.module) == (Verdict.BUG, "encoder")
    assert found.where.pass_ == "input gradient"


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)

    def forward(self, x, memory):
        return (x @ torch.tanh(self.k(memory)).mT).softmax(-1) @ self.v(memory)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = Reader()

    def forward(self, x, memory):
        return x + self.read(x.tanh(), memory)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class Story(nn.Module):
    """One memory for all halves, and as many scores of what they make."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.halves = nn.Linear(3, 4), nn.ModuleList(Half() for _ in range(3))
        self.scores, self.head = nn.ModuleList(Scores() for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x, given):
        memory = torch.tanh(self.memory(given))
        for half in self.halves:
            x = half(x, memory)
        return self.head(torch.cat([score(x) for score in self.scores], -1).mean(1))


class FlatStory(FlatPort):
    """``fault`` cuts the memory, or a score, off in the second turn."""

    def forward(self, x, given):
        memory = torch.tanh(self.linear("memory", given))
        for i in range(3):
            seen = memory.detach() if self.fault == "memory" and i == 1 else memory
            k, v = (
                torch.tanh(self.linear(f"halves_{i}_read_k", seen)),
                self.linear(f"halves_{i}_read_v", seen),
            )
            x = x + torch.einsum("ntc,nsc->nts", x.tanh(), k).softmax(-1) @ v
        weights = torch.cat([getattr(self, f"scores_{i}_weight") for i in range(3)], 1)
        first, second, third = torch.tanh(x @ weights).chunk(3, -1)
        second = second.detach() if self.fault == "score" else second
        return self.linear("head", torch.cat([first, second, third], -1).mean(1))


@pytest.mark.parametrize(("fault", "module"), [("memory", "halves.1.read"), ("score", "scores.1")])
def test_a_loop_does_the_same_to_all_so_that_one_of_its_modules_is_it(fault, module):
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 5, WIDTH), "given": torch.randn(4, 6, 3)}
    batches = [(inputs, torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Story(), lambda old: FlatStory(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert found.where.pass_ == "input gradient"


class Player(nn.Module):
    """Trained by what the judge says, which is not trained by it, less what is known of the player."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.judge = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        move = torch.tanh(self.actor(x))
        known = self.judge(move.detach())
        self.judge.requires_grad_(False)
        said = self.judge(move)
        self.judge.requires_grad_(True)
        return known, said / said.abs().mean().detach()


class FlatPlayer(FlatPort):
    def forward(self, x):
        move = torch.tanh(self.linear("actor", x))
        weights = self.judge_weight, self.judge_bias
        known = F.linear(move if self.fault == "known" else move.detach(), *weights)
        said = F.linear(move, *(w if self.fault == "weights" else w.detach() for w in weights))
        mean = said.abs().mean()
        return known, said / (mean if self.fault == "mean" else mean.detach())


@pytest.mark.parametrize(
    ("fault", "pass_"),
    [("known", "input gradient"), ("weights", "weight gradient"), ("mean", "input gradient")],
)
def test_one_of_several_that_the_reference_detaches(fault, pass_):
    torch.manual_seed(1)
    batches = [(torch.randn(5, 4), torch.randn(5, 1)) for _ in range(2)]
    found = diagnose(
        Player(),
        lambda old: FlatPlayer(old, fault),
        batches,
        loss=lambda made, target: F.mse_loss(made[0], target) - made[1].mean(),
        steps=2,
    )
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, "", pass_)
    assert "goes on where the reference detaches" in " ".join(str(found).split())
