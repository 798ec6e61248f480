"""What cannot be checked is refused in one line; what was handed over stays as it was."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError, gradient_check

torch.set_num_threads(1)


class Raising(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("no derivative\nis known")


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def divides_by_zero(x):
    return x / 0 + 1 // 0


class Mine(BaseException):
    pass


def interrupts(outputs):
    raise Mine("mine")


RAISING = f"(finite/test_refusals.py:{divides_by_zero.__code__.co_firstlineno + 1})"
REFUSED = {
    "a vector": (linear(), drawn(4, 5), lambda o: o, "not one real number but torch.float64 [4, 3]"),
    "none": (linear(), drawn(4, 5), lambda o: None, "not one real number but NoneType"),
    "a Python number": (linear(), drawn(4, 5), lambda o: o.sum().item(), "not one real number but float"),
    "an integer": (linear(), drawn(4, 5), lambda o: o.argmax(), "depends on no parameter"),
    "detached": (linear(), drawn(4, 5), lambda o: o.detach().sum(), "depends on no parameter"),
    "a NaN": (linear(), drawn(4, 5), lambda o: o.sum() * math.nan, "the loss is nan"),
    "infinite": (linear(), drawn(4, 5), lambda o: o.sum() / 0, "inf"),
    "a loss that wants targets": (linear(), drawn(4, 5), nn.MSELoss(), "missing 1 required"),
    "no function": (linear(), drawn(4, 5), "mse", "loss is a str: give a function"),
    "no loss": (linear(), drawn(4, 5), 3, "loss is a int: give a function"),
    "a loss that raises": (linear(), drawn(4, 5), divides_by_zero, RAISING),
    "a loss that leaves": (linear(), drawn(4, 5), lambda o: sys.exit(3), "a call of sys.exit"),
    "a loss with an error of its own": (linear(), drawn(4, 5), interrupts, "Mine: mine (finite/"),
    "no rows": (linear(), drawn(0, 5), torch.sum, "inputs holds no number ([0, 5])"),
    "a network that raises": (
        divides_by_zero,
        drawn(4),
        None,
        f"ZeroDivisionError: integer division or modulo by zero {RAISING}",
    ),
    "no network": (None, drawn(4, 5), None, "'NoneType' object is not callable"),
    "inputs of another size": (linear(), drawn(4, 6), None, "cannot be multiplied"),
    "no tensors": (linear(), None, None, "must be Tensor, not NoneType"),
    "too few arguments": (linear(), (), None, "missing 1 required"),
    "integers and no parameters": (torch.neg, torch.arange(4), None, "nothing requires a gradient"),
    "frozen, on integers": (
        nn.Embedding(9, 2).requires_grad_(False),
        torch.arange(4),
        None,
        "nothing requires a gradient",
    ),
    "float32 by its own hands": (
        lambda x: x @ torch.ones(5, 2),
        drawn(4, 5),
        None,
        "does not run in float64",
    ),
    "without sizes yet": (nn.LazyLinear(3), drawn(4, 5), None, "no shape yet (a lazy module)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_checked_is_refused_in_one_line(name):
    module, inputs, loss, says = REFUSED[name]
    with pytest.raises(DiagnoseError) as refusal:
        gradient_check(module, inputs, loss)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("directions", [0, 1, -1, 2.5, "3", None, True])
def test_a_number_of_directions_that_is_none_is_refused(directions):
    with pytest.raises(DiagnoseError, match=r"directions=.*2 or more"):
        gradient_check(linear(), drawn(4, 5), directions=directions)


def test_a_backward_pass_that_raises_fails_with_its_words():
    found = gradient_check(lambda x: Raising.apply(x), drawn(4))
    assert (found.outcome, found.suspect) == ("fail", None)
    assert "ValueError: no derivative is known" in found.reading


def test_a_gradient_that_is_not_finite_fails_in_its_leaf():
    found = gradient_check(
        lambda a, b: a.sum() + torch.where(b > 0, b.sqrt(), 0 * b).sum(), (drawn(2), drawn(9, seed=1))
    )
    assert found.outcome == "fail"
    assert "gradient of input.1 is not finite" in found.reading


@pytest.mark.parametrize("state", ["python", "generator"])
def test_a_loss_that_is_another_one_each_time_is_undecided(state):
    counted, generator = [], torch.Generator().manual_seed(0)

    def forward(x):
        counted.append(1)
        return x * (len(counted) if state == "python" else torch.rand(x.shape, generator=generator))

    found = gradient_check(forward, drawn(4))
    assert found.outcome == "undecided"
    assert "another one when it is computed again" in found.reading
    assert not found


def test_a_loss_that_nothing_moves_is_undecided():
    found = gradient_check(linear(), drawn(4, 5), lambda o: (0 * o).sum())
    assert found.outcome == "undecided"
    assert "zero" in found.reading


def test_a_loss_that_drowns_in_a_constant_is_undecided():
    found = gradient_check(linear(), drawn(4, 5), lambda o: o.square().mean() + 1e14)
    assert found.outcome == "undecided"
    assert found.sees > 1e-3


@pytest.mark.parametrize(
    "kinked", [lambda x: torch.where(x > 0, x, 0 * x), torch.abs, lambda x: x.norm(), lambda x: x * x.norm()]
)
def test_a_corner_at_the_point_itself_is_checked_beside_it(kinked):
    found = gradient_check(kinked, torch.zeros(3))
    assert found.outcome == "pass"
    assert "beside the given point" in found.reading


def test_a_relu_at_its_kink_is_checked_beside_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 9, bias=False), nn.ReLU(), nn.Linear(9, 3))
    found = gradient_check(net, torch.zeros(4, 5), lambda o: o.square().mean())
    assert found.outcome == "pass"
    assert "beside the given point" in found.reading


class Busy(nn.Module):
    """A network that uses random numbers and writes into buffers, its input and its own weights' grads."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x, scale):
        self.calls += 1
        x.mul_(1.5)
        out = self.last(self.drop(self.norm(x))) * scale
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out + self.mean


def states(tensors):
    return [
        (
            id(t),
            t.dtype,
            t.requires_grad,
            t._version,
            t.detach().clone(),
            None if t.grad is None else t.grad.clone(),
        )
        for t in tensors
    ]


def same(one, other):
    return one == other if not isinstance(one, torch.Tensor) else torch.equal(one, other)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_that_is_handed_over_is_changed(training, wrong):
    torch.manual_seed(0)
    net = Busy().train(training)
    net.last.bias.requires_grad_(False)
    net.last.weight.grad = drawn(3, 5, seed=3)
    if wrong:
        net.last.weight.register_hook(lambda g: 1.01 * g)
    inputs = {"x": drawn(6, 5), "scale": drawn(3, seed=1).requires_grad_()}
    loss = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(0), nn.Linear(18, 1))
    tensors = [*net.parameters(), *net.buffers(), *inputs.values(), *loss.parameters(), *loss.buffers()]
    before, modes = states(tensors), [m.training for m in (*net.modules(), *loss.modules())]
    settings = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    random = torch.get_rng_state()

    found = gradient_check(net, inputs, loss)

    assert found.outcome == ("fail" if wrong else "pass"), found
    assert torch.equal(torch.get_rng_state(), random)
    after = states([*net.parameters(), *net.buffers(), *inputs.values(), *loss.parameters(), *loss.buffers()])
    assert all(
        same(a, b) for one, other in zip(before, after, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert [m.training for m in (*net.modules(), *loss.modules())] == modes
    assert (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    ) == settings


def test_random_numbers_are_left_as_they_were_where_the_check_is_refused():
    net, random = nn.Sequential(nn.Dropout(), nn.Linear(5, 3)), torch.get_rng_state()
    with pytest.raises(DiagnoseError):
        gradient_check(net, drawn(4, 6))
    assert torch.equal(torch.get_rng_state(), random)


def test_the_mode_of_the_network_is_the_mode_that_is_checked():
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    x = drawn(1, 5)
    assert gradient_check(net.eval(), x).outcome == "pass"
    with pytest.raises(DiagnoseError, match="more than 1 value per channel"):
        gradient_check(net.train(), x)


def test_inputs_that_require_gradients_are_the_only_ones_that_are_moved():
    a, b = drawn(4), drawn(4, seed=1)

    def wrong_in_b(a, b):
        return a * (2 * b.detach() - b.detach() + (b - b.detach()) * 3)

    assert gradient_check(wrong_in_b, (a, b)).suspect.leaf == "input.1"
    assert gradient_check(wrong_in_b, (a.requires_grad_(), b)).outcome == "pass"


def test_a_loss_with_weights_of_its_own_dtype_is_widened_with_it():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, outputs):
            return F.cross_entropy(outputs, torch.tensor([0, 1, 2, 0]), weight=self.weight)

    loss = Weighted()
    assert gradient_check(linear(), drawn(4, 5), loss).outcome == "pass"
    assert loss.weight.dtype == torch.float32
