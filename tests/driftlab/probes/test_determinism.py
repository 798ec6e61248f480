"""Whether a network repeats itself, and where and by how much it does not."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.arithmetic.passes import CannotRunError, Recorded, whole_network
from driftlab.network.calling import whole
from driftlab.probes.determinism import REPEATS, repeats
from driftlab.words import Verdict
from tests.driftlab.arithmetic.layers import plain


class Counting:
    """A counter that copies of a module share, as a clock is shared."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.count

    def __deepcopy__(self, memo):
        return self


class Layer(nn.Module):
    def __init__(self, function=plain):
        super().__init__()
        self.fc, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return self.function(self.fc(x))


class Backward(torch.autograd.Function):
    """Nothing, with a gradient that grows from call to call."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.clock(), None


class Weighted(nn.Module):
    """A linear layer whose weight gradient alone does not repeat itself."""

    def __init__(self):
        super().__init__()
        self.fc, self.clock = nn.Linear(6, 6), Counting()

    def forward(self, x):
        return F.linear(x, Backward.apply(self.fc.weight, self.clock), self.fc.bias)


class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.clock = Counting()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x):
        if self.training:
            self.seen.mul_(self.clock())
        return x


class Scaled(nn.Module):
    def __init__(self, factor, modes=(True, False)):
        super().__init__()
        self.factor, self.modes = factor, modes

    def forward(self, x):
        return x * self.factor() if self.training in self.modes else x


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(Layer(), middle, nn.Linear(6, 3))


def batch():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)
    return whole_network(whole, F.cross_entropy, x, y)


@pytest.mark.parametrize(
    "middle",
    [Layer(), nn.Dropout(0.5), nn.BatchNorm1d(6), Layer(lambda x: x * torch.rand_like(x)), nn.RReLU()],
    ids=["linear", "dropout", "batch norm", "numbers of torch", "random slopes"],
)
def test_a_network_that_is_drawn_from_torch_alone_repeats_itself(middle):
    assert repeats(network(middle), batch()) is None


def test_the_module_that_moves_and_by_how_much():
    clock = Counting()
    found = repeats(network(nn.Sequential(Layer(), Layer(lambda x: x * (clock() + 1)))), batch(), times=2)
    assert (found.pass_, found.module) == ("forward", "1.1")
    assert found.floor > 0.01


def test_the_floor_is_the_largest_relative_difference():
    clock = Counting()
    call = Recorded((torch.ones(4),), gradients={"": torch.ones(4)})
    found = repeats(Scaled(lambda: 1 + 0.25 * (clock() > 2)), call, times=2)
    assert found.floor == pytest.approx(0.25)
    assert found.pass_ == "forward"


@pytest.mark.parametrize(
    ("middle", "place"),
    [
        (lambda: Layer(lambda x: x * random.random()), ("forward", "1")),
        (lambda: Scaled(random.random), ("forward", "1")),
        (lambda: Scaled(random.random, modes=[False]), ("eval", "1")),
        (Weighted, ("weight gradient", "1.fc")),
        (Drifting, ("buffer", "1")),
    ],
    ids=["forward", "without weights", "eval", "weight gradient", "buffer"],
)
def test_the_pass_that_does_not_repeat_itself_is_named(middle, place):
    found = repeats(network(middle()), batch())
    assert (found.pass_, found.module) == place
    assert found.floor > 0


def test_an_input_gradient_that_moves_shows_in_the_last_layer_before_it():
    clock = Counting()
    found = repeats(network(Layer(lambda x: Backward.apply(x, clock))), batch())
    assert (found.pass_, found.module) == ("weight gradient", "1.fc")


def test_one_wrong_bit_in_the_last_of_the_repetitions_counts():
    calls = Counting()

    def once(x):
        return torch.nextafter(x, torch.tensor(torch.inf)) if calls() == 2 * REPEATS - 1 else x

    found = repeats(network(Layer(once)), batch())
    assert 0 < found.floor < 2**-20
    assert repeats(network(Layer(once)), batch()) is None


def test_the_seed_is_that_of_every_repetition():
    calls = []

    def drawn(x):
        calls.append(torch.rand(1).item())
        return x

    assert repeats(network(Layer(drawn)), batch(), seed=5, times=3) is None
    torch.manual_seed(5)
    assert set(calls) == {torch.rand(1).item()}
    assert len(calls) == 2 * 3


def test_what_does_not_run_is_said():
    with pytest.raises(CannotRunError, match="RuntimeError"):
        repeats(network(Layer(lambda x: x.view(7, -1))), batch())


def test_the_network_and_its_batch_are_left_as_they_were():
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    written, whole_batch = network(Drifting()), whole_network(whole, F.cross_entropy, x, y)
    written.insert(0, nn.ReLU(inplace=True))
    before = x.clone()
    assert repeats(written, whole_batch) is not None
    assert torch.equal(x, before)
    assert written[2].seen.tolist() == [1, 1, 1]


class Placing(Layer):
    """Puts numbers where others are, for which torch has no kernel with an order, beside a clock."""

    def __init__(self):
        super().__init__()
        self.clock = Counting()

    def forward(self, x):
        y = self.fc(x)
        return y.clone().put_(torch.tensor([0]), y[:1, 0] + 1e-3 * self.clock())


def test_what_torch_has_no_kernel_for_that_repeats_itself_is_named():
    batch = torch.randn(4, 6), torch.randn(4, 6)
    found = diagnose(Placing(), copy.deepcopy, [batch], loss=F.mse_loss, steps=1)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert "torch has no kernel that repeats itself here of put_" in found.headline
