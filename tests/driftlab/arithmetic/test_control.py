"""The control within one pass: chaos within a network is no fault, and hides none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.comparison import compare
from driftlab.arithmetic.passes import Recorded, run
from driftlab.fold import find_fold
from driftlab.network.pair import Pair
from driftlab.probes.examination import Examination
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.words import Verdict

torch.set_num_threads(1)
SIZE = 32


class Elman(nn.Module):
    """A recurrent network of some gain; ``halves`` sums in another order, ``fault`` sets in at ``late``."""

    def __init__(self, gain=10.0, *, halves=False, fault=0.0, late=0):
        super().__init__()
        torch.manual_seed(0)
        self.given, self.kept = nn.Linear(3, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.out = nn.Linear(SIZE, 2)
        self.kept.weight.data = torch.randn(SIZE, SIZE) * gain / SIZE**0.5
        self.halves, self.fault, self.late = halves, fault, late

    def again(self, state):
        weight, half = self.kept.weight, SIZE // 2
        if not self.halves:
            return F.linear(state, weight)
        return F.linear(state[:, :half], weight[:, :half]) + F.linear(state[:, half:], weight[:, half:])

    def forward(self, x):
        state = x.new_zeros(len(x), SIZE)
        for step, given in enumerate(x.unbind(1)):
            factor = 1 + self.fault if step >= self.late else 1
            state = torch.tanh(self.given(given) + factor * self.again(state))
        return self.out(state)


class Placed(nn.Module):
    """Of each row the first number is where it stands, as in the patches of Pix2Struct."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.places, self.given, self.factor = nn.Embedding(9, SIZE), nn.Linear(3, SIZE), factor

    def forward(self, x):
        place, numbers = x[..., 0].long(), x[..., 1:]
        return (self.places(place) + self.factor * self.given(numbers)).tanh().mean(1)


class Masked(Placed):
    """The first number is which share of the rows is kept, as SpeechBrain counts lengths."""

    def forward(self, x):
        kept = torch.arange(x.shape[1]) < x[:, :1, 0] * x.shape[1]
        return (self.factor * self.given(x[..., 1:]) * kept[..., None]).tanh().sum(1)


def asked(candidate, gain=10.0, length=64):
    reference, given = Elman(gain), torch.Generator().manual_seed(1)
    return examined(reference, candidate, torch.randn(4, length, 3, generator=given))


def examined(reference, candidate, inputs):
    candidate.load_state_dict(reference.state_dict())
    fold = find_fold(reference, candidate)
    stepper = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    pair = Pair(reference, candidate, fold, F.cross_entropy, stepper, stepper)
    found = Examination(pair, (inputs, torch.tensor([0, 1, 1, 0])))
    return found, next(iter(FUNCTION.ask(found))).evidence


def test_the_order_of_a_sum_in_a_chaotic_network_is_rounding():
    found, evidence = asked(Elman(halves=True))
    assert found.network.untold()
    assert evidence.supports is Verdict.ROUND_OFF
    assert "chaotic" in evidence.reading
    assert "the first 16 of 64 along dimension 1" in evidence.reading


def test_a_fault_in_a_chaotic_network_shows_on_shorter_inputs():
    _, evidence = asked(Elman(halves=True, fault=1e-3))
    assert evidence.supports is Verdict.BUG
    assert "on the first 16 of 64" in evidence.reading


@pytest.mark.slow
def test_a_fault_that_sets_in_where_nothing_can_be_told_is_not_acquitted():
    _, evidence = asked(Elman(halves=True, fault=1e-2, late=40))
    assert evidence.supports is None
    assert evidence.measured > evidence.threshold


@pytest.mark.parametrize("fault", [1e-3, 1e-9])
def test_without_chaos_the_control_changes_nothing(fault):
    found, evidence = asked(Elman(0.5, fault=fault), 0.5, 12)
    assert evidence.supports is Verdict.BUG
    assert all(d.control == 0 for d in found.network.differences)


@pytest.mark.parametrize("arithmetic", ["float64", "shadow", "float32"])
def test_a_unit_moves_weights_and_inputs_by_a_unit(arithmetic):
    module, x = nn.Linear(5, 4), torch.randn(3, 5)
    call, unit = Recorded((x,)), torch.Generator().manual_seed(0)
    still, moved = (run(module, call, arithmetic, unit=u).tensors["forward"][""] for u in (None, unit))
    size = 2.0**-23 if arithmetic == "float32" else 2.0**-52
    off = float((moved - still).norm() / still.norm())
    assert 0 < off < 8 * size


def test_equal_entries_of_a_window_are_no_chaos():
    pool, x = nn.MaxPool1d(2), torch.ones(2, 1, 6, requires_grad=True)
    call = Recorded((x,), gradients={"": torch.ones(2, 1, 3)})

    class Last(nn.Module):
        def forward(self, x):
            return pool(x.flip(-1)).flip(-1)

    found = compare(pool, Last(), call, lambda t: t)
    assert [d.pass_ for d in found.wrong()] == ["input gradient"]
    assert not found.untold()


@pytest.mark.parametrize("network", [Placed, Masked])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.BIT_IDENTICAL), (1.001, Verdict.BUG)])
def test_what_jumps_is_not_chaotic(network, factor, verdict):
    """One unit less is another index, or one row fewer, and no rounding makes that."""
    first = torch.arange(20.0).remainder(9) if network is Placed else torch.full((20,), 0.6)
    numbers = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    inputs = torch.cat([first.reshape(4, 5, 1), numbers], 2)
    found, evidence = examined(network(), network(factor), inputs)
    assert not found.network.untold()
    assert evidence.supports is verdict
