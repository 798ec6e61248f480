"""How a module is called on its batch, against what its ``forward`` is seen to receive."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from driftlab.network.calling import calling, seed_random_layers, step_seed


def module(forward):
    """A module that answers what its forward was given."""
    return type("Given", (nn.Module,), {"forward": forward})()


def one(self, x):
    return (x,)


def two(self, x, y):
    return (x, y)


def two_or_three(self, x, y, scale=2.0):
    return (x, y, scale)


def positional_only(self, x, y, /):
    return (x, y)


def named_only(self, *, x, y):
    return (x, y)


def any_number(self, *parts):
    return parts


def any_names(self, **parts):
    return tuple(parts.values())


X, Y = torch.zeros(1), torch.ones(1)
Pair = namedtuple("Pair", "x y")
MADE = {"x": X, "y": Y}


@pytest.mark.parametrize(
    ("forward", "inputs", "expected"),
    [
        (one, X, (X,)),
        (two_or_three, X[None], None),
        (any_number, X, (X,)),
        (one, (X,), (X,)),
        (one, (X, Y), ((X, Y),)),
        (one, [X, Y], ([X, Y],)),
        (two, (X, Y), (X, Y)),
        (two, [X, Y], (X, Y)),
        (two, Pair(X, Y), (X, Y)),
        (two_or_three, (X, Y), (X, Y, 2.0)),
        (two_or_three, (X, Y, 3.0), (X, Y, 3.0)),
        (positional_only, (X, Y), (X, Y)),
        (named_only, (X, Y), None),
        (any_number, (X, Y, X), (X, Y, X)),
        (any_number, (), ()),
        (one, MADE, (MADE,)),
        (two, MADE, (X, Y)),
        (two, {"y": Y, "x": X}, (X, Y)),
        (two_or_three, MADE | {"scale": 3.0}, (X, Y, 3.0)),
        (named_only, OrderedDict(MADE), (X, Y)),
        (any_names, MADE, (X, Y)),
        (positional_only, MADE, None),
        (any_number, MADE, (MADE,)),
        (one, {"x": X}, (X,)),
        (one, {"image": X}, ({"image": X},)),
        (one, "text", ("text",)),
    ],
)
def test_a_forward_gets_its_batch_as_its_signature_asks(forward, inputs, expected):
    network = module(forward)
    call = calling(network, inputs)
    if expected is None:  # handed over whole, which this forward does not take
        with pytest.raises(TypeError):
            call(network, inputs)
        return
    found = call(network, inputs)
    assert len(found) == len(expected)
    assert all(a is b or a == b for a, b in zip(found, expected, strict=True))


@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 6))
def test_a_tuple_is_unpacked_exactly_where_forward_takes_that_many(required, optional, given):
    names = [f"a{i}" for i in range(required + optional)]
    text = ", ".join(n if i < required else f"{n}=None" for i, n in enumerate(names))
    scope = {}
    exec(f"def forward(self, {text}): return a0", scope)
    network, inputs = module(scope["forward"]), tuple(torch.full((1,), float(i)) for i in range(given))
    call = calling(network, inputs)
    if given <= len(names) and given >= required:
        assert call(network, inputs) is inputs[0]
    elif given > len(names) and required == 1:
        assert call(network, inputs) is inputs
    else:
        with pytest.raises(TypeError):
            call(network, inputs)


def test_layers_of_torch_are_called_as_their_signatures_ask():
    lstm, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    state = torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)
    outputs, _ = calling(lstm, (x, state))(lstm, (x, state))
    assert torch.equal(outputs, lstm(x, state)[0])
    attention, q = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    batch = {"query": q, "key": q, "value": q, "need_weights": False}
    assert calling(attention, batch)(attention, batch)[1] is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_module_of_unknown_signature_gets_arguments_unpacked():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    scripted = torch.jit.script(Sum())
    for inputs in ((X, Y), {"x": X, "y": Y}):
        assert torch.equal(calling(scripted, inputs)(scripted, inputs), X + Y)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_a_step_of_a_window_has_a_seed_that_torch_takes(seed):
    """A window's own seed is that of the step at which it begins, whatever the training's."""
    drawn = []
    for step in (0, 1, 0):
        seed_random_layers(step_seed(step_seed(seed, 3), step))
        drawn.append(float(torch.rand(1)))
    assert drawn[0] == drawn[2] != drawn[1]


def test_no_two_seeds_or_steps_draw_the_same():
    drawn = set()
    for seed in (0, 1, 2, 7, 3000, 2**32 - 1):
        for step in (0, 1, 2, 5000):
            seed_random_layers(step_seed(seed, step))
            drawn.add(float(torch.rand((), dtype=torch.float64)))
    assert len(drawn) == 6 * 4
