"""Networks that return the same numbers in other containers: the same verdict as of bare tensors."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError, assert_equivalent, diagnose
from driftlab.lockstep.window import Snapshots, Window
from driftlab.network.pair import Pair, the_pair
from driftlab.probes.excess import ask_excess
from driftlab.words import Excess

torch.set_num_threads(1)


class ModelOutput(OrderedDict):
    """As transformers': a dict whose entries are attributes too, None's only the latter."""

    def __init__(self, **fields):
        super().__init__((name, value) for name, value in fields.items() if value is not None)
        self.__dict__.update(fields)


CONTAINERS = {
    "tensor": lambda logits, hidden: logits,
    "tuple": lambda logits, hidden: (logits, None),
    "output": lambda logits, hidden: ModelOutput(loss=None, logits=logits, hidden_states=None),
    "logits": lambda logits, hidden: {"logits": logits},
    "scores": lambda logits, hidden: {"scores": logits},
    "hidden": lambda logits, hidden: ModelOutput(logits=logits, hidden_states=(hidden,)),
    "aside": lambda logits, hidden: {"logits": logits, "aux": 2 * hidden.detach()},
    "swapped": lambda logits, hidden: [{"aside": hidden}, logits],
}


class Net(nn.Module):
    def __init__(self, container, more=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.container, self.more = CONTAINERS[container], more

    def forward(self, x):
        hidden = F.silu(self.body(x))
        return self.container(self.head(hidden) + self.more, hidden)


def loss(outputs, targets):
    """It takes any of them, and does not change where 3 is added."""
    if isinstance(outputs, dict):
        outputs = outputs["logits" if "logits" in outputs else "scores"]
    elif isinstance(outputs, tuple | list):
        outputs = next(o for o in outputs if isinstance(o, torch.Tensor))
    return F.cross_entropy(outputs, targets)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 5), torch.randint(3, (8,)))]


def asked(mine, theirs, more=0.0, **options):
    return diagnose(Net(mine), Net(theirs, more), batches(), loss=loss, steps=2, **options)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [("output", "tensor"), ("tensor", "tuple"), ("logits", "scores"), ("tensor", "swapped")],
)
def test_other_containers_hide_neither_a_fault_nor_make_one(mine, theirs):
    assert asked(mine, theirs).verdict in ("bit_identical", "round_off")
    assert_equivalent(Net(mine), Net(theirs), batches()[0][0])
    found = asked(mine, theirs, more=3.0)
    assert (found.verdict, found.where.pass_, found.where.step) == ("bug", "forward", 0)
    with pytest.raises(AssertionError, match=r"\+3 added to every element"):
        assert_equivalent(Net(mine), Net(theirs, 3.0), batches()[0][0])


def test_an_output_that_nothing_looked_at_leaves_the_verdict_open():
    found = asked("aside", "scores")
    assert found.verdict == "inconclusive"
    assert "the candidate returns nothing for `aux`" in found.headline
    assert "outputs={'aux':" in found.headline
    with pytest.raises(DiagnoseError, match="returns nothing for `aux`"):
        assert_equivalent(Net("aside"), Net("scores"), batches()[0][0])
    # by hand it need not be looked at; a fault elsewhere is one all the same
    assert asked("aside", "scores", outputs={"aux": None}).verdict == "bit_identical"
    assert_equivalent(Net("aside"), Net("scores"), batches()[0][0], outputs={"aux": None})
    assert asked("aside", "scores", more=3.0).verdict == "bug"


def test_an_output_that_the_loss_depends_on_is_said_to_be_missing_and_no_more():
    found = asked("hidden", "tensor")
    said = next(e for e in found.evidence if e.probe == "outputs")
    assert found.verdict == "bit_identical"
    assert "`logits` is the tensor itself in the candidate" in said.reading
    assert "returns no `hidden_states[0]`, compared by what the loss makes of it" in said.reading


def test_outputs_are_mapped_by_hand():
    def first(outputs):
        return outputs["logits"]

    found = asked("tensor", "aside", outputs=first)
    assert found.verdict == "bit_identical"
    assert asked("tensor", "aside", more=3.0, outputs=first).verdict == "bug"
    with pytest.raises(AssertionError):
        assert_equivalent(Net("tensor"), Net("aside", 3.0), batches()[0][0], outputs=first)
    assert asked("aside", "aside", outputs={"aux": "aux"}).verdict == "bit_identical"


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ("logits", "outputs='logits': give a mapping"),
        ({"logits": 0}, "give a mapping"),
        ({"logit": "scores"}, "the reference returns no 'logit'; it returns `logits`"),
        ({"logits": "score"}, "the candidate returns no 'score'; it returns `scores`"),
        (lambda outputs: outputs["score"], "KeyError"),
    ],
)
def test_a_mapping_that_maps_nothing_is_refused_in_a_line(outputs, line):
    with pytest.raises(DiagnoseError, match=line):
        asked("logits", "scores", outputs=outputs)
    with pytest.raises(DiagnoseError, match=line):
        assert_equivalent(Net("logits"), Net("scores"), batches()[0][0], outputs=outputs)


def test_what_float64_shows_before_any_update_is_not_cleared_as_rounding():
    """Where the look on the spot does not see what the curves measured, nothing was cleared by it."""
    mine, other, fold = the_pair(Net("tensor"), Net("scores"), None)
    pair = Pair(mine, other, fold, loss, sgd_of, sgd_of)
    kept = Snapshots(pair, Window(pair, batches(), 1, dtypes=("float32",), controls=()))
    for step, measured, supports in ((0, 1e-3, None), (0, 0.0, "round_off"), (1, 1e-3, "round_off")):
        found = ask_excess(kept, Excess(0, step, "logit_distance", measured, 1e-9))
        assert [f.evidence.supports for f in found] == [supports]


def sgd_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)
