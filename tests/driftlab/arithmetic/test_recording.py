"""What every module was given, against hooks and gradients taken by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.passes import run, whole_network
from driftlab.arithmetic.recording import chosen, record
from driftlab.network.calling import whole


class Block(nn.Module):
    """Writes into what it is given, uses a layer twice, and leaves one out."""

    def __init__(self):
        super().__init__()
        self.fc, self.again, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x, *, scale):
        x = self.act(self.fc(x)) * scale
        return {"out": self.again(self.again(x)), "aside": x.detach()}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block = nn.Linear(4, 6), Block()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.block(self.stem(x), scale=2.0)["out"]))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)


def recorded(network=None, seed=0):
    return record(network or Network(), whole_network(whole, F.cross_entropy, *batch()), seed)


def test_modules_come_in_the_order_in_which_they_began():
    assert list(recorded()) == ["stem", "block", "block.fc", "block.act", "block.again", "drop", "head"]


def test_inputs_and_gradients_are_those_of_a_run_by_hand():
    network, calls = Network(), recorded(seed=3)
    x, y = batch()
    torch.manual_seed(3)
    stem = network.stem(x)
    before = network.block.fc(stem)
    inner = F.relu(before) * 2.0
    first = network.block.again(inner)
    second = network.block.again(first)
    dropped = network.drop(second)
    loss = F.cross_entropy(network.head(dropped), y)
    outputs = [stem, before, first, second, dropped]
    gradients = torch.autograd.grad(loss, outputs)
    found = [calls["stem"][0], calls["block.fc"][0], *calls["block.again"], calls["drop"][0]]
    for call, given, gradient in zip(found, [x, stem, inner, first, second], gradients, strict=True):
        torch.testing.assert_close(call.args[0].detach(), given)
        torch.testing.assert_close(call.gradients[""], gradient)


def test_an_argument_is_kept_as_it_was_before_the_module_wrote_into_it():
    act = recorded()["block.act"][0]
    assert bool((act.args[0] < 0).any())


def test_keywords_and_outputs_without_a_gradient_are_kept_too():
    block = recorded()["block"][0]
    assert block.kwargs == {"scale": 2.0}
    assert block.gradients["aside"] is None
    assert block.gradients["out"].shape == (5, 6)


def test_which_arguments_take_a_gradient_is_kept():
    calls = recorded()
    assert not calls["stem"][0].args[0].requires_grad
    assert calls["block"][0].args[0].requires_grad


@pytest.mark.parametrize("name", ["stem", "block.fc", "block.act", "block.again", "head"])
def test_a_module_run_alone_on_what_was_recorded_gives_the_gradients_of_the_whole(name):
    network, (x, y) = Network(), batch()
    network.drop.p = 0.0
    x.requires_grad_()
    calls = record(network, whole_network(whole, F.cross_entropy, x.detach().clone().requires_grad_(), y))
    F.cross_entropy(network(x), y).backward()
    part = network.get_submodule(name)
    alone = [run(part, call, "float32", evaluate=False).tensors for call in calls[name]]
    for key, parameter in part.named_parameters():
        total = sum(p["weight gradient"][key] for p in alone)
        torch.testing.assert_close(total, parameter.grad.double(), rtol=1e-5, atol=1e-7)
    if name == "stem":
        torch.testing.assert_close(alone[0]["input gradient"]["0"], x.grad.double(), rtol=1e-5, atol=1e-7)


class Repeated(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.fc, self.times = nn.Linear(4, 4), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.fc(x))
        return x


@pytest.mark.parametrize(("times", "kept"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 6])])
def test_of_many_calls_the_first_two_and_the_last_are_chosen(times, kept):
    network, (x, _) = Repeated(times), batch()
    inputs = []
    for _ in range(times):
        inputs.append(x)
        x = torch.tanh(network.fc(x)).detach()
    calls = record(network, whole_network(whole, lambda out, _: out.sum(), inputs[0], None))["fc"]
    assert len(calls) == times
    for call, index in zip(chosen(calls), kept, strict=True):
        torch.testing.assert_close(call.args[0].detach(), inputs[index])


def test_a_frozen_part_is_kept_without_gradients():
    network = Network()
    network.stem.requires_grad_(False)
    assert recorded(network)["stem"][0].gradients == {"": None}


def test_the_network_and_the_batch_are_left_as_they_were():
    network, given = Network(), batch()
    before = copy.deepcopy(network.state_dict())
    record(network, whole_network(whole, F.cross_entropy, *given))
    assert all(torch.equal(before[n], t) for n, t in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert torch.equal(given[0], batch()[0])


def test_a_batch_that_wants_gradients_is_left_without_them():
    x, y = batch()
    record(Network(), whole_network(whole, F.cross_entropy, x.requires_grad_(), y))
    assert x.grad is None


def test_a_network_that_writes_into_its_batch_writes_into_a_copy():
    network = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    x, y = batch()
    calls = record(network, whole_network(whole, F.cross_entropy, x, y))
    assert torch.equal(calls["0"][0].args[0], batch()[0])
    assert torch.equal(x, batch()[0])
