"""Which output of one network stands for which of another's."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from driftlab.network.calling import named_leaves
from driftlab.network.outputs import Outputs
from driftlab.words import DiagnoseError

A, B, C = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) ** 2, torch.ones(4)
LOSS = torch.tensor(2.5)


class ModelOutput(OrderedDict):
    """As transformers': a dict whose entries are attributes too, None's only the latter."""

    def __init__(self, **fields):
        super().__init__((name, value) for name, value in fields.items() if value is not None)
        self.__dict__.update(fields)


class Cache:
    """As transformers': tensors in objects in a list; it also holds itself."""

    def __init__(self, *layers):
        self.layers, self.me, self.step = [ModelOutput(keys=k) for k in layers], self, torch.relu


@dataclass
class Named:
    mean: torch.Tensor
    spread: torch.Tensor


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (A, [""]),
        ((A, None), ["[0]"]),
        ([A, (B, {"x": C})], ["[0]", "[1][0]", "[1][1].x"]),
        (namedtuple("Pair", "y x")(A, B), ["y", "x"]),
        (Named(A, B), ["mean", "spread"]),
        (
            ModelOutput(loss=LOSS, logits=A, hidden_states=(B, C)),
            ["loss", "logits", "hidden_states[0]", "hidden_states[1]"],
        ),
        (ModelOutput(logits=A, past_key_values=Cache(B)), ["logits", "past_key_values.layers[0].keys"]),
        ({"a": torch.arange(3), 7: A}, ["[7]"]),
        ({"net": torch.nn.Linear(2, 2), "why": None}, []),
    ],
)
def test_leaves_are_spelled_as_in_code(outputs, names):
    assert list(named_leaves(outputs)) == names


def paired(mine, theirs, given=None):
    """The reference's name -> the candidate's."""
    mine, theirs = named_leaves(mine), named_leaves(theirs)
    known = {id(t): n for n, t in theirs.items()}
    return {m: known[id(t)] for m, t in Outputs(given).of(theirs, mine).items()}


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs"),
    [
        (A, ModelOutput(loss=None, logits=A + 3), {"": "logits"}),
        ((A, None), A + 3, {"[0]": ""}),
        ({"logits": A}, {"scores": A + 3}, {"logits": "scores"}),
        ({"x": A, "y": B}, {"y": B, "x": A}, {"x": "x", "y": "y"}),
        # names are believed, whatever the values say
        ({"x": A, "y": B}, {"y": A, "x": B}, {"x": "x", "y": "y"}),
        ((A, B), (B, A), {"[0]": "[0]", "[1]": "[1]"}),
        ({"x": A}, {"x": C}, {"x": "x"}),
        # places and shapes
        (ModelOutput(loss=LOSS, logits=A), (LOSS + 1, A + 3), {"loss": "[0]", "logits": "[1]"}),
        (ModelOutput(loss=LOSS, logits=A), (A + 3, LOSS + 1), {"loss": "[1]", "logits": "[0]"}),
        ((A, B), [[A + 3, B]], {"[0]": "[0][0]", "[1]": "[0][1]"}),
        # values among several of one shape; the last is found though it is off
        (A, {"first": B, "second": A.clone()}, {"": "second"}),
        ({"x": A, "y": B}, {"p": B + 0.01, "q": A}, {"x": "q", "y": "p"}),
        ({"x": A, "y": B}, {"p": B + 0.01, "q": A + 3}, {"x": "q", "y": "p"}),
        # none of its shape
        (A, {"z": C}, {}),
        ({"x": A, "z": C}, A + 3, {"x": ""}),
    ],
)
def test_leaves_are_paired_by_name_then_place_shape_and_value(mine, theirs, pairs):
    assert paired(mine, theirs) == pairs


def test_a_hand_given_pair_goes_before_all_others():
    mine, theirs = {"x": A, "y": B, "z": C}, {"x": A.clone(), "y": B.clone(), "z": C.clone()}
    assert paired(mine, theirs, {"x": "y", "y": "x", "z": None}) == {"x": "y", "y": "x"}
    with pytest.raises(DiagnoseError, match="the candidate returns no 'w'; it returns `x`, `y`, `z`"):
        Outputs({"x": "w"}).check(theirs, mine)
    with pytest.raises(DiagnoseError, match="the reference returns no 'w'"):
        Outputs({"w": None}).check(theirs, mine)


def test_what_was_paired_once_stays_paired():
    outputs = Outputs()
    before = outputs.of({"p": A + 0.01, "q": B}, {"": A})
    after = outputs.of({"p": B, "q": A}, {"": A})
    assert torch.equal(before[""], A + 0.01)
    assert torch.equal(after[""], B)
