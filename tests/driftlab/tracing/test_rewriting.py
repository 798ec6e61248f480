"""A value that is put in, by either way of doing it; and code that comes by one place again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.blame import callers
from driftlab.tracing.flow import Recorder
from driftlab.tracing.rewriting import Rewriter, instead, writing
from driftlab.tracing.scopes import Scopes


class Block(nn.Module):
    """Writes in place, takes parts, and calls one norm twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.enter, self.head = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x):
        gate, value = self.enter(self.norm(x)).chunk(2, -1)
        value = F.relu(value, inplace=True)
        value *= torch.sigmoid(gate)
        return self.head(self.norm(value) + x)


def recorded(change=None):
    network, batch = Block(), torch.linspace(-1, 1, 24).view(6, 4)
    recorder = Recorder(Scopes(network), change)
    recorder.given(list(network.parameters()), [batch])
    with recorder, torch.no_grad():
        return recorder.flow, network(batch)


NUMBERS = [n for n, value in enumerate(recorded()[0].values) if value.made_by[0] and value.prints]


@pytest.mark.parametrize("number", NUMBERS)
def test_rewriting_gives_what_writing_into_the_recorded_value_gives(number):
    def write(at, value, tensor):
        if at == number:
            with writing(tensor) as own:
                own.copy_(torch.full(tensor.shape, 0.5))

    flow, expected = recorded(write)
    operation, _, place = flow.values[number].made_by
    values = torch.full((flow.values[number].prints.whole[0],), 0.5)
    network, batch = Block(), torch.linspace(-1, 1, 24).view(6, 4)
    with Rewriter({(operation, place): instead(values)}), torch.no_grad():
        found = network(batch)
    assert torch.equal(found, expected)
    if flow.uses()[number]:  # unlike the statistics that a norm keeps for its backward pass
        assert not torch.equal(found, recorded()[1])


def test_every_operation_is_one_of_the_flow():
    operations = {value.made_by[0] for value in recorded()[0].values} - {0}
    assert operations == set(range(1, len(operations) + 1))


def here():
    return callers()


def test_code_in_a_loop_comes_by_the_same_place():
    first, second, third = (here() for _ in range(3))
    assert first == second == third


def test_another_line_is_another_place_whoever_is_called():
    one = here()
    other = here()
    assert one[0] == other[0]
    assert one != other
