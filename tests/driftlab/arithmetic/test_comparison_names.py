"""What a comparison pairs and what it leaves alone: outputs, weights, hooks, infinities."""

import copy

import pytest
import torch
from torch import nn

from driftlab.arithmetic.comparison import compare
from driftlab.arithmetic.passes import CannotRunError
from tests.driftlab.arithmetic.layers import FAULTS, Halves, Layer, call, joined


def compared(candidate, reference=None, given=None):
    return compare(reference or Layer(), candidate, given or call(), dict)


class Several(nn.Module):
    """Outputs by name, of which one is no use."""

    def __init__(self, factor=1.0, unused=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.factor, self.unused = nn.Linear(6, 5), factor, unused

    def forward(self, x):
        return {"used": self.factor * self.fc(x), "aside": self.unused * x}


def test_an_output_that_no_gradient_came_back_to_does_not_count():
    given = call()
    given.gradients = {"aside": None, "used": given.gradients[""]}
    assert compared(Several(unused=1.1), Several(), given).wrong() == []
    wrong = compared(Several(factor=1.1), Several(), given).wrong()
    assert (wrong[0].pass_, wrong[0].name) == ("forward", "used")


def test_weight_gradients_are_compared_under_the_names_of_the_reference():
    reference = nn.Linear(6, 5)
    found = compare(
        reference, Halves(reference), call(), joined("mine.", "theirs."), prefixes=("mine", "theirs")
    )
    named = [d.name for d in found.differences if d.pass_ == "weight gradient"]
    assert named == ["mine.weight", "mine.bias"]
    assert found.wrong() == found.narrow() == []


def test_an_infinity_in_both_hides_nothing_else():
    def masked(factor):
        mask = torch.tensor([False, False, True, False, False])
        return Layer(on_result=lambda y: (factor * y).masked_fill(mask, -torch.inf))

    given = call()
    given.gradients = {"": torch.zeros(7, 5)}
    assert compared(masked(1.0), masked(1.0), given).wrong() == []
    assert "forward" in {d.pass_ for d in compared(masked(1.5), masked(1.0), given).wrong()}


def doubled(weight):
    weight.grad.mul_(2)


@pytest.mark.parametrize(
    "hook",
    [
        lambda weight: weight.register_hook(lambda gradient: 2 * gradient),
        lambda weight: weight.register_post_accumulate_grad_hook(doubled),
    ],
    ids=["on the gradient", "on the accumulated gradient"],
)
def test_a_hook_on_a_weight_is_part_of_the_module(hook):
    candidate = Layer()
    hook(candidate.fc.weight)
    wrong = compared(candidate).wrong()
    assert [(d.pass_, d.name) for d in wrong] == [("weight gradient", "fc.weight")]


def test_what_does_not_run_in_float32_is_refused():
    broken = Layer(on_result=lambda y: y.view(-1, 11))
    for pair in ((broken, Layer()), (Layer(), broken)):
        with pytest.raises(CannotRunError, match="RuntimeError"):
            compared(*pair)


def test_neither_module_nor_the_inputs_are_changed():
    mine, theirs, given = Layer(), Layer(**FAULTS["buffer"]), call()
    before = [copy.deepcopy(m.state_dict()) for m in (mine, theirs)]
    compared(theirs, mine, given)
    for module, state in zip((mine, theirs), before, strict=True):
        assert all(torch.equal(state[n], t) for n, t in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())
    assert given.args[0].grad is None
