"""Which module is wrong by itself: faults planted in known places."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.local import local_calls
from driftlab.arithmetic.locating import SAME_BORDERS, first_wrong, slightly_wrong
from driftlab.arithmetic.passes import Recorded
from driftlab.arithmetic.sizes import without_ties
from driftlab.fold import find_fold
from driftlab.network.pair import Pair
from tests.driftlab.arithmetic.layers import FAULTS, Halves, Layer, plain
from tests.driftlab.arithmetic.shadowing import Calling


class Block(nn.Module):
    def __init__(self, **spoilt):
        super().__init__()
        self.inner, self.out = Layer(**spoilt), nn.Linear(5, 6)

    def forward(self, x):
        return torch.tanh(self.out(self.inner(x)))


def network(**spoilt):
    """Blocks 1 and 2, with a fault where given: number -> options."""
    torch.manual_seed(0)
    blocks = [Block(**spoilt.get(f"block{i}", {})) for i in (1, 2)]
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 3))
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5)
    return whole


def batch(*shape):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape or (12, 6), generator=generator)
    return x, torch.randint(3, (len(x),), generator=generator)


def local(reference, candidate, given=None):
    fold = find_fold(reference, candidate)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    return local_calls(Pair(reference, candidate, fold, F.cross_entropy, make, make), given or batch())


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("pass_", FAULTS)
def test_a_planted_fault_is_found_in_its_module_and_pass(pass_, number):
    pair = local(network(), network(**{f"block{number}": FAULTS[pass_]}))
    name, difference = first_wrong(pair)
    place = f"{number}.inner.norm" if pass_ == "buffer" else f"{number}.inner"
    assert (name, difference.pass_) == (place, pass_)
    # nobody but the module and those that it lies in
    wrong = {n for n in pair.calls if pair.wrong(n) is not None}
    assert wrong == {n for n in pair.calls if place == n or place.startswith(f"{n}.")}


def test_the_first_of_two_faults_in_the_order_of_execution():
    candidate = network(block1=FAULTS["eval"], block2=FAULTS["forward"])
    assert first_wrong(local(network(), candidate))[0] == "1.inner"


def test_the_last_of_two_faults_where_the_backward_pass_comes_to_it_first():
    candidate = network(block1=FAULTS["input gradient"], block2=FAULTS["input gradient"])
    assert first_wrong(local(network(), candidate))[0] == "2.inner"


@pytest.mark.parametrize("narrow", [plain, lambda x: x.bfloat16().to(x.dtype)], ids=["a copy", "fewer bits"])
def test_where_nothing_is_wrong_nobody_is_accused(narrow):
    pair = local(network(), network(block1={"on_input": narrow}))
    assert first_wrong(pair) is None
    assert slightly_wrong(pair) is None


def test_a_right_split_is_rewritten_and_not_wrong():
    candidate = network()
    candidate[1].out = Halves(candidate[1].out)
    pair = local(network(), candidate)
    assert pair.rewritten() == ["1.out"]
    assert isinstance(pair.pair("1.out")[1], Halves)
    assert first_wrong(pair) is None


def test_rewritten_are_the_smallest_modules_in_the_order_of_execution():
    candidate = network(block2={"momentum": 0.2})
    candidate[3] = Halves(candidate[3])
    candidate[0].register_forward_hook(lambda module, args, output: None)
    assert local(network(), candidate).rewritten() == ["0", "2.inner.norm", "3"]


class Before(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.factor = nn.Linear(6, 5), factor

    def forward(self, x):
        return self.factor * self.fc(x)


def normed(factor):
    torch.manual_seed(3)
    first = Before(factor)
    return nn.Sequential(first, nn.LayerNorm(5, eps=0.0), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("factor", "found"), [(1.0, False), (1 + 1e-4, True), (1 + 10 * SAME_BORDERS, False)]
)
def test_a_small_fault_that_the_network_hides_is_found_and_moved_borders_are_none(factor, found):
    slight = slightly_wrong(local(normed(1.0), normed(factor)))
    assert (slight is not None) is found
    if found:
        assert (slight[0], slight[1].pass_) == ("0", "forward")
        assert slight[1].relative == pytest.approx(factor - 1, rel=1e-3)


def pooling(pool):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), Calling(pool), nn.Flatten(), nn.Linear(8, 3))


def pooled(x):
    return F.max_pool2d(x, 2)


def pooled_from_the_other_end(x):
    return pooled(x.flip(2, 3)).flip(2, 3)


def test_equal_entries_of_a_window_may_share_the_gradient_otherwise():
    _, y = batch(3, 1, 4, 4)
    ties = (torch.randint(2, (3, 1, 4, 4), generator=torch.Generator().manual_seed(0)).float(), y)
    pair = local(pooling(pooled), pooling(pooled_from_the_other_end), ties)
    assert {d.pass_ for c in pair.comparisons("1") for d in c.wrong()} == {"input gradient"}
    assert pair.wrong("1") is None
    assert first_wrong(pair) is None


def test_a_module_behind_a_fault_is_not_given_the_references_inputs():
    pair = local(network(), network(block1={"on_result": lambda y: 3 * y}))
    assert pair.aligned("1.inner")
    assert not pair.aligned("1.out")
    assert first_wrong(pair)[0] == "1.inner"


def test_every_kept_call_is_compared():
    class Twice(nn.Module):
        def __init__(self, second):
            super().__init__()
            torch.manual_seed(0)
            self.fc = Layer(on_result=lambda y: second(y) if bool(y.abs().max() > 1e3) else y)
            self.out = nn.Linear(5, 3)

        def forward(self, x):
            return self.out(self.fc(x) + self.fc(1e4 * x))

    def blown(model):
        model.fc.norm = nn.Identity()
        return model

    pair = local(blown(Twice(plain)), blown(Twice(lambda y: y * 1.01)))
    first, second = pair.comparisons("fc")
    assert first.wrong() == []
    assert second.wrong()[0].pass_ == "forward"
    assert pair.wrong("fc") is not None


def test_modules_that_take_other_arguments_are_not_compared():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x)

    class Head(nn.Module):
        def __init__(self, kind, *more):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.more = kind(6, 3), more

        def forward(self, x):
            return self.fc(x, *self.more)

    pair = local(Head(nn.Linear), Head(Masked, None))
    assert pair.comparisons("fc") == []
    assert first_wrong(pair) is None


def test_noise_breaks_ties_and_changes_nothing_else():
    x = torch.tensor([[1.0, 1.0, -2.0, 5.0]]).requires_grad_()
    call = Recorded((x, torch.arange(3)), {"scale": torch.tensor(2.0)}, {"": torch.ones(1)})
    before = copy.deepcopy(x)
    jittered = without_ties(call)
    moved = jittered.args[0]
    assert moved.requires_grad
    assert moved[0, 0] != moved[0, 1]
    assert bool(((moved - x).abs() < 6e-3 * x.std()).all())
    assert torch.equal(jittered.args[1], torch.arange(3))
    assert jittered.kwargs["scale"] == 2.0
    assert jittered.gradients is call.gradients
    assert torch.equal(x, before)
