"""Networks that keep state, recompute, cast inside, explode, or do not let themselves be copied."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from driftlab import DiagnoseError, gradient_check
from tests.driftlab.finite.kinds import Net, squares


class Own(torch.autograd.Function):
    """The sine, computed in ``dtype`` where nobody sees it; its gradient times ``factor``."""

    @staticmethod
    def forward(ctx, x, dtype, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.to(dtype).sin().to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g * ctx.saved_tensors[0].cos(), None, None


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(reentrant, factor):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(net, x):
        y = checkpoint(net.block, torch.tanh(net.first(x)), use_reentrant=reentrant)
        return net.last(Own.apply(y, torch.float64, factor))

    return Net(forward, first=nn.Linear(5, 8), block=block, last=nn.Linear(8, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_checked_like_what_they_recompute(reentrant):
    assert gradient_check(blocks(reentrant, 1.0), drawn(6, 5), squares).outcome == "pass"
    found = gradient_check(blocks(reentrant, 1.5), drawn(6, 5), squares)
    assert (found.outcome, found.suspect.leaf) == ("fail", "block.3.bias")


def test_a_reentrant_checkpoint_leaves_gradients_behind_a_closure_alone():
    judge = nn.Linear(2, 1).double()
    judge.weight.grad = torch.ones_like(judge.weight)
    gradient_check(blocks(True, 1.0), drawn(6, 5), lambda o: judge(o).mean())
    assert torch.equal(judge.weight.grad, torch.ones_like(judge.weight))
    assert judge.bias.grad is None


@pytest.mark.parametrize("detached", [True, False])
def test_a_buffer_that_is_replaced_starts_anew(detached):
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            out = self.linear(x)
            seen = out.detach() if detached else out
            self.mean = 0.9 * self.mean + 0.1 * seen.mean(0)
            return out * (1 + self.mean)

    found = gradient_check(Running(), drawn(4, 5), squares)
    assert found.outcome == ("fail" if detached else "pass"), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("seed", range(3))
def test_a_function_that_computes_in_fewer_bits_inside_is_no_fail(dtype, count, seed):
    found = gradient_check(
        lambda x: Own.apply(x * 1.0, dtype, 1.0).square(), drawn(count, seed=seed), torch.sum, seed=seed
    )
    assert found.outcome == "undecided", found


def test_a_cast_for_the_log_does_not_hide_a_fault():
    logged = []

    def forward(x):
        logged.append(x.detach().float().mean())
        return Own.apply(x, torch.float64, 1.1)

    assert gradient_check(forward, drawn(9), torch.sum).outcome == "fail"


@pytest.mark.parametrize("rounds", [40, 80])
def test_a_gradient_that_explodes_is_no_fail(rounds):
    def forward(net, x):
        for _ in range(rounds):
            x = net.r * x * (1 - x)
        return x

    found = gradient_check(Net(forward, r=torch.tensor(3.9)), torch.rand(6), torch.sum)
    assert found.outcome != "fail", found


def test_a_corner_beside_a_slope_is_checked_beside_it():
    found = gradient_check(lambda x: x.abs() + x, torch.zeros(30), torch.sum)
    assert found.outcome == "pass"
    assert "beside the given point" in found.reading


def test_a_loss_that_is_always_zero_does_not_hide_a_fault():
    assert gradient_check(lambda x: x - x.detach(), drawn(9), torch.sum).outcome == "fail"


def test_a_pruned_layer_is_checked_in_the_weights_that_are_trained():
    layer = nn.Linear(5, 3)
    prune.l1_unstructured(layer, "weight", 0.5)
    found = gradient_check(layer, drawn(4, 5))
    assert found.outcome == "pass"
    assert "all 38 numbers" in found.reading  # 20 of the inputs, 15 weights and 3 biases


UNFIT = {
    "sparse": (nn.Identity(), lambda: drawn(4, 5).relu().to_sparse(), "give it dense"),
    "a bound method": (nn.Linear(5, 3).forward, lambda: drawn(4, 5), "hand over the network itself"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_unfit_is_named(name):
    module, inputs, says = UNFIT[name]
    with pytest.raises(DiagnoseError, match=says):
        gradient_check(module, inputs())


def test_inputs_are_left_alone_where_the_backward_pass_is_refused():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(x.mul_(2)) if not x.is_leaf else self.linear(2 * x)

    inputs = drawn(4, 5).requires_grad_()
    before = inputs.detach().clone()
    with pytest.raises(DiagnoseError, match="backward pass does not run in float64"):
        gradient_check(Writing(), inputs, lambda o: F.huber_loss(o, torch.zeros(4, 3)))
    assert inputs.grad is None
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("loss", [None, torch.sum])
def test_another_default_device_changes_nothing(loss):
    linear, inputs = nn.Linear(5, 3), drawn(4, 5)
    with torch.device("meta"):
        assert gradient_check(linear, inputs, loss).outcome == "pass"


def test_apart_is_said_as_a_share_of_the_gradient():
    found = gradient_check(lambda x: Own.apply(x, torch.float64, 1.5), 1e6 * drawn(50), torch.sum)
    assert "of the gradient apart" in found.reading
