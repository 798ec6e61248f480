"""Hard cases of the gradient check: noise, kinks, ends of the domain, odd sizes, odd networks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError, gradient_check
from tests.driftlab.finite.kinds import Net


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.mark.parametrize(("fault", "passes"), [(lambda x: x, True), (Doubled.apply, False)])
def test_a_loss_that_is_nan_beside_the_point_is_checked_further_away(fault, passes):
    x = torch.cat([torch.full((1,), 1e-9, dtype=torch.float64), drawn(20).abs()])
    assert bool(gradient_check(lambda x: fault(x).sqrt(), x)) is passes


def test_a_float_mask_with_infinities_does_not_hide_a_fault():
    mask = torch.full((4, 4), -math.inf).triu(1)
    found = gradient_check(
        lambda q, mask: (Doubled.apply(q) + mask).softmax(-1).square(), (drawn(4, 4), mask)
    )
    assert found.outcome != "pass"


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(40))
def test_a_loss_that_cancels_to_zero_is_right(seed):
    x = drawn(1, seed=seed)
    constant = x.clone()
    assert gradient_check(lambda x: 1.1 * x - 1.1 * constant, x, torch.sum, seed=seed).outcome == "pass"


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", [161, *range(20)])
def test_an_odd_function_at_zero_is_right(seed):
    net = Net(lambda s, x: s.w.sin() * 3 + x.sinh(), w=torch.zeros(2))
    torch.manual_seed(seed)
    assert gradient_check(net, torch.zeros(2), torch.sum, seed=seed).outcome == "pass"


@pytest.mark.parametrize(("frequency", "seed"), [(1e3, 25), (3e3, 0), (3e4, 5)])
def test_a_high_frequency_is_right(frequency, seed):
    torch.manual_seed(seed)
    x = torch.randn(1 + seed % 50)
    assert gradient_check(lambda x: (frequency * x).sin(), x, seed=seed).outcome == "pass"


@pytest.mark.parametrize("seed", range(6))
def test_an_oscillation_faster_than_the_step_is_no_fail(seed):
    torch.manual_seed(seed)
    assert gradient_check(lambda x: (1e7 * x).sin(), torch.randn(1 + seed), seed=seed).outcome != "fail"


@pytest.mark.drawn(16)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.5, 1.01])
@pytest.mark.parametrize("count", [100, 10_000])
def test_the_wrong_element_is_named(count, factor, seed):
    def wrong(g):
        g = g.clone()
        g[count // 3] *= factor
        return g

    net = Net(lambda s, x: s.w * x, w=drawn(count, seed=seed))
    net.w.register_hook(wrong)
    found = gradient_check(net, drawn(count, seed=seed + 1), lambda o: o.sin().sum(), seed=seed)
    assert found.suspect.index == (count // 3,), found
    assert "in every direction" not in found.reading


def test_the_size_of_a_small_factor_can_be_read():
    net = linear()
    net.weight.register_hook(lambda g: (1 + 1e-6) * g)
    found = gradient_check(net, drawn(4, 5), lambda o: o.square().sum())
    assert found.outcome == "fail"
    assert "gives 1 times" not in found.reading


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda p: F.binary_cross_entropy(p, torch.ones_like(p)), torch.tensor([0.0, 0.5, 1.0])),
        (lambda p: -torch.distributions.Categorical(probs=p).logits, torch.tensor([[0.0, 1.0]])),
    ],
)
def test_what_raises_beside_the_point_is_no_stray_exception(function, inputs):
    try:
        found = gradient_check(function, inputs)
    except DiagnoseError:
        return
    assert found.outcome != "fail"


def test_no_grad_around_it_changes_nothing():
    with torch.no_grad():
        assert gradient_check(linear(), drawn(4, 5)).outcome == "pass"


def test_inference_mode_around_it_changes_nothing():
    with torch.inference_mode():
        assert gradient_check(linear(), drawn(4, 5)).outcome == "pass"


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_inside_is_undecided(seed):
    torch.manual_seed(seed)
    net = Net(lambda s, x: F.linear(x.bfloat16(), s.w.bfloat16()).to(x.dtype), w=torch.randn(4, 5))
    assert (
        gradient_check(net, torch.randn(10, 5), lambda o: o.square().mean(), seed=seed).outcome == "undecided"
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_in_float32_is_undecided(seed):
    torch.manual_seed(seed)
    found = gradient_check(nn.Linear(5, 4), torch.randn(10, 5), lambda o: 100 + o.float().mean(), seed=seed)
    assert found.outcome == "undecided"


def test_a_loss_whose_backward_knows_no_float64_is_refused():
    target = drawn(4, 3).float()
    with pytest.raises(DiagnoseError, match="backward pass does not run in float64"):
        gradient_check(linear(), drawn(4, 5), lambda o: F.huber_loss(o, target))


def test_a_padding_row_is_no_bug():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    tokens = torch.tensor([[0, 3, 4], [5, 0, 0]])
    found = gradient_check(net, tokens)
    assert found.outcome == "pass" or "padding_idx" in found.reading


def test_a_parameter_named_input_does_not_hide_the_input():
    net = Net(lambda s, x: Doubled.apply(x) * s.input, input=drawn(5))
    assert gradient_check(net, drawn(5, seed=1)).outcome == "fail"


def test_the_parameters_of_a_loss_module_are_checked():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs):
            return (Doubled.apply(self.scale) * outputs).square().sum()

    assert gradient_check(linear(), drawn(4, 5), Loss()).outcome == "fail"


def test_hooks_on_complex_parameters_are_kept():
    net = Net(lambda s, x: (s.w * x).abs() ** 2, w=torch.complex(drawn(3).float(), drawn(3, seed=1).float()))
    net.w.register_hook(lambda g: 2 * g)
    assert gradient_check(net, drawn(3, seed=2)).outcome == "fail"


def test_gradients_behind_a_closure_are_left_alone():
    net = linear().double()
    gradient_check(lambda x: net(x), drawn(6, 5))
    assert all(p.grad is None for p in net.parameters())


def test_a_large_constant_is_named_as_the_reason():
    found = gradient_check(linear(), drawn(4, 5), lambda o: o.square().mean() + 1e14)
    assert found.outcome == "undecided"
    assert "not smooth" not in found.reading


def test_a_detached_statistic_is_not_called_a_step_function():
    def forward(net, x):
        y = net.first(x)
        return torch.tanh(y - y.mean(0).detach())

    torch.manual_seed(0)
    found = gradient_check(Net(forward, first=nn.Linear(5, 7)), drawn(9, 5), lambda o: o.square().mean())
    assert (found.outcome, found.suspect.leaf) == ("fail", "first.bias")
    assert "step function" not in found.reading


def test_kinks_are_not_called_fewer_bits():
    torch.manual_seed(1)
    found = gradient_check(lambda x: x.abs(), torch.randn(20_000), torch.sum, seed=1)
    assert "fewer bits" not in found.reading


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_sizes_whose_squares_do_not_fit(scale):
    found = gradient_check(linear().double(), drawn(4, 5), lambda o: scale * o.square().sum())
    assert found.outcome == "pass"
    assert 0 < found.sees < 1e-3


@pytest.mark.parametrize("seed", [None, "a", 1.5])
def test_a_seed_of_the_wrong_type_is_named(seed):
    with pytest.raises(DiagnoseError, match="seed="):
        gradient_check(linear(), drawn(4, 5), seed=seed)


def test_a_complex_loss_is_refused():
    with pytest.raises(DiagnoseError):
        gradient_check(linear(), drawn(4, 5), lambda o: torch.complex(o.sum(), o.sum()))
