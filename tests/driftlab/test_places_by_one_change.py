"""A network written anew, all its values of other sizes: one change of the reference tells the place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 6


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, -1)
        return value * torch.sigmoid(1.5 * gate)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(WIDTH), Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        shares = (x * x).softmax(-1)
        return x + self.out(self.gate(self.norm(x))) * shares + x.mean(-1, keepdim=True).detach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InOne(nn.Module):
    """All of it at once, beside a row of zeros, so that no value has the size that it had."""

    def __init__(self, old: Net, fault: str = "", at: tuple[int, ...] = (1,), times: float = 1.0):
        super().__init__()
        self.fault, self.at, self.times = fault, at, times
        for name, parameter in old.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

    def linear(self, name, x):
        return x @ getattr(self, name + "_weight").T + getattr(self, name + "_bias")

    def block(self, i, x):
        fault, name = self.fault if i in self.at else "", f"blocks_{i}_"
        held = x.detach() if fault == "norm is given a detached value" else x
        y = F.layer_norm(
            held, [WIDTH], getattr(self, name + "norm_weight"), getattr(self, name + "norm_bias")
        )
        y = x if fault == "no norm" else y
        value, gate = self.linear(name + "gate_both", y).chunk(2, -1)
        if fault == "gate for value":
            value, gate = gate, value
        if fault == "half of the gate's gradient":
            gate = gate.detach() + self.times * (gate - gate.detach())
        if fault == "gate does not teach":
            gate = gate.detach()
        y = value * torch.sigmoid((self.times if fault == "another number" else 1.5) * gate)
        shares = (x * x).softmax(0 if fault == "another dimension" else -1)
        mean = x.mean(-1, keepdim=True)
        mean = mean if fault == "mean teaches" else mean.detach()
        return x + self.linear(name + "out", y) * shares + mean

    def forward(self, x):
        zero = torch.zeros_like(x[:1])
        if self.fault != "another dimension":
            x = torch.cat([zero, x])
        x = self.linear("enter", x)
        for i in range(2):
            x = self.block(i, x)
        x = x if self.fault == "another dimension" else x[1:]
        return self.linear("head", x)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, WIDTH), torch.randint(3, (8,))) for _ in range(3)]


def judged(**options):
    return diagnose(Net(), lambda old: InOne(old, **options), batches(), loss=F.cross_entropy, steps=3)


def told(found):
    return "\n".join(e.details for e in found.evidence if e.probe == "function")


def test_written_anew_it_is_right():
    assert judged().verdict is Verdict.ROUND_OFF


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("fault", "module", "pass_", "words"),
    [
        ("gate does not teach", "gate", "input gradient", "detached there"),
        ("norm is given a detached value", "", "input gradient", "detached there"),
        ("mean teaches", "", "input gradient", "goes on where the reference detaches"),
        ("no norm", "norm", "forward", "`layer_norm` left out"),
        ("gate for value", "gate", "forward", "parts 1 and 2 of `chunk` exchanged"),
        ("another dimension", "", "forward", "`softmax` along dimension 0"),
    ],
)
def test_the_call_that_would_do_it_is_named_with_its_module(fault, module, pass_, words, at):
    found = judged(fault=fault, at=(at,))
    assert found.verdict is Verdict.BUG
    assert found.where.module == f"blocks.{at}.{module}".rstrip(".")
    assert found.where.pass_ == pass_
    assert words in told(found)


@pytest.mark.parametrize(
    ("number", "times"), [(0.0, "0"), (-1.5, "-1"), (1.4999, "0.999933"), (0.75, "0.5"), (6.0, "4")]
)
def test_another_number_is_found(number, times):
    found = judged(fault="another number", times=number)
    assert found.where.module == "blocks.1.gate"
    assert f"{times} times the number in `mul`" in told(found).replace("1/2 times", "0.5 times")


@pytest.mark.parametrize("times", [0.5, 2.0, -1.0, 1.001])
def test_a_gradient_that_is_scaled_is_told_with_its_factor(times):
    found = judged(fault="half of the gate's gradient", times=times)
    assert (found.where.module, found.where.pass_) == ("blocks.1.gate", "input gradient")
    assert f"{times:.4g} times the gradient" in told(found)


def test_the_same_in_every_block_is_told_as_such():
    found = judged(fault="another number", at=(0, 1), times=6.0)
    assert found.where.module == "blocks.0.gate"
    assert "4 times the number in `mul`, each time" in told(found)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0].gate.requires_grad_(False)


def test_a_frozen_weight_that_is_trained_has_its_owner():
    found = diagnose(Frozen(), InOne, batches(), loss=F.cross_entropy, steps=3)
    assert (found.where.module, found.where.pass_) == ("blocks.0.gate.both", "weight gradient")


class Twice(nn.Module):
    """One matrix for two steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second, self.head = self.first, nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def untied(old):
    old.second = nn.Linear(WIDTH, WIDTH)
    old.second.load_state_dict(old.first.state_dict())
    return old


def test_a_tie_undone_is_no_stopped_gradient():
    found = diagnose(Twice(), untied, batches(), loss=F.cross_entropy, steps=3)
    assert found.verdict is Verdict.BUG
    assert "detached" not in told(found)


class Body(nn.Module):
    """One activation for two steps."""

    def __init__(self):
        super().__init__()
        self.act, self.one, self.two = nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.two(self.act(self.one(self.act(x))))


class BodyInOne(nn.Module):
    def __init__(self, old: nn.Sequential):
        super().__init__()
        self.weights = nn.ParameterList(p.detach().clone() for p in old.parameters())

    def forward(self, x):
        (one, of_one, two, of_two, head, of_head), zero = self.weights, torch.zeros_like(x[:1])
        x = torch.cat([zero, x]) @ one.T + of_one  # not activated before
        x = F.silu(x) @ two.T + of_two
        return x[1:] @ head.T + of_head


def test_one_call_of_an_activation_for_two_steps_is_its_callers_affair():
    torch.manual_seed(0)
    net = nn.Sequential(Body(), nn.Linear(WIDTH, 3))
    found = diagnose(net, BodyInOne, batches(), loss=F.cross_entropy, steps=3)
    assert (found.where.module, found.where.pass_) == ("0", "forward")
    assert "`silu` left out" in told(found)
