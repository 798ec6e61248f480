"""Shadow execution: how a network is run, trained and copied, against the network made ``double()``."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic, shadowed
from tests.driftlab.arithmetic.shadowing import Calling, assert_equal_in_shadow, in_double, in_shadow


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def rows():
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(1))]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


WRAPPED = {
    "autocast": lambda net: lambda x: torch.autocast("cpu", torch.bfloat16)(net)(x).float(),
    "checkpoint": lambda net: lambda x: checkpoint(net, x, use_reentrant=False),
    "reentrant checkpoint": lambda net: lambda x: checkpoint(net, x, use_reentrant=True),
    "vmap": lambda net: torch.vmap(net),
    "no gradient": lambda net: torch.no_grad()(net),
}


class Wrapped(nn.Module):
    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x):
        return self.wrap(self.inner)(x)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_how_a_network_is_run_does_not_matter(wrap):
    reference = network() if wrap is not WRAPPED["no gradient"] else Wrapped(network(), wrap)
    assert_equal_in_shadow(Wrapped(network(), wrap), rows(), reference)


def test_a_custom_function_runs_forward_and_backward():
    inputs = rows()
    assert_equal_in_shadow(Calling(Cube.apply), inputs, Calling(lambda x: x * x * x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights_stay_tied_and_get_both_gradients():
    twin = shadowed(Tied())
    assert twin.first.weight is twin.second.weight
    assert [n for n, _ in twin.named_parameters()] == ["first.weight"]
    again = copy.deepcopy(twin)
    assert again.first.weight is again.second.weight is not twin.first.weight
    assert_equal_in_shadow(Tied(), rows())


def test_a_shadowed_module_is_a_copy_that_keeps_what_its_tensors_are():
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    module[0].weight.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    twin = shadowed(module)
    for (name, own), (_, other) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert isinstance(other, nn.Parameter)
        assert (other.requires_grad, other.dtype) == (own.requires_grad, torch.float32)
        assert torch.equal(held(other), own.detach().double()), name
    assert twin[1].num_batches_tracked.dtype == torch.int64
    with shadow_arithmetic():
        twin(shadow(rows()[0])).sum().backward()
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert held(twin[1].running_mean).any()
    assert module[0].bias.grad is None


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_in_shadow_moves_weights_as_it_moves_double_ones(make):
    wide, twin = network().double(), shadowed(network())
    optimizers = make(wide.parameters(), lr=0.1), make(twin.parameters(), lr=0.1)
    for _ in range(4):
        for module, optimizer, x in (
            (wide, optimizers[0], rows()[0].double()),
            (twin, optimizers[1], shadow(rows()[0])),
        ):
            with shadow_arithmetic() if module is twin else torch.enable_grad():
                optimizer.zero_grad()
                module(x).square().sum().backward()
                optimizer.step()
    for a, b in zip(wide.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(held(b), a.detach(), rtol=1e-11, atol=1e-13)


def test_a_fault_of_the_float32_path_alone_shows():
    faulty = Calling(lambda x: x * 1.5 if x.dtype == torch.float32 else x)
    (x,) = rows()
    assert torch.equal(in_shadow(faulty, [x])[0].held, 1.5 * x.double())
    assert torch.equal(in_double(faulty, [x])[0], x.double())
    with shadow_arithmetic():
        assert torch.equal(held(faulty(shadow(x.double()))), x.double())


def test_a_batch_goes_in_and_comes_out_in_its_structure():
    batch = {"x": torch.tensor([0.1], requires_grad=True), "y": [torch.tensor([3]), (torch.ones(2), "name")]}
    found = shadow(batch)
    assert found["x"].is_leaf
    assert found["x"].requires_grad
    assert found["y"][0] is batch["y"][0]
    back = held(found)
    assert torch.equal(back["x"], torch.tensor([0.1]).double())
    assert not back["x"].requires_grad
    assert back["y"][1][0].dtype == torch.float64
    assert back["y"][1][1] == "name"


def test_outside_nothing_changes_even_after_an_error():
    with torch.backends.mkldnn.flags(enabled=True):
        with pytest.raises(RuntimeError, match="invalid"), shadow_arithmetic():
            torch.ones(2).reshape(3)
        assert torch.backends.mkldnn.enabled
    assert type(torch.ones(2) * 2) is torch.Tensor


def test_a_nudge_moves_stored_constants_by_one_unit_and_nothing_else():
    constant = torch.rand(200, generator=torch.Generator().manual_seed(2)) + 0.5
    x = shadow(torch.zeros(200))
    with shadow_arithmetic(torch.Generator().manual_seed(0)):
        moved, still = held(x + constant), held(x + 0.3)
    up, down = (torch.nextafter(constant, torch.tensor(to)).double() for to in (torch.inf, -torch.inf))
    assert bool(((moved == up) | (moved == down)).all())
    assert 50 < int((moved == up).sum()) < 150
    assert torch.equal(still, torch.full((200,), 0.3, dtype=torch.float64))
