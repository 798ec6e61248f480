"""Several candidates beside one reference: each row is that of a training of one candidate alone."""

import copy

import pytest
import torch

from driftlab.lockstep.checkpoint import save_checkpoint
from driftlab.lockstep.together import Together, sharing
from tests.driftlab.lockstep.test_lockstep import STEPS, batch, load_checkpoint, lockstep, network


def rewritten(reference, by):
    """A copy; of another function where ``by`` is not 1; 1e30 blows up."""
    other = copy.deepcopy(reference)
    other[6].register_forward_hook(lambda module, args, out: out * by)
    return other


def alone(by, dropout=0.0, **options):
    reference = network(dropout)
    return lockstep(reference, rewritten(reference, by), seed=5, **options)


def together(factors, dropout=0.0, **options):
    first, *others = (alone(by, dropout, **options) for by in factors)
    return Together([first, *(sharing(first, other) for other in others)])


def go(steps, start=0, stop=STEPS + 1):
    for step in range(start, stop):
        steps.forward_backward(step, *batch(step))
        steps.update(step)
    steps.flush()
    return steps


def assert_same_rows(mine, other):
    assert mine.rows.keys() == other.rows.keys()
    for step, row in other.rows.items():
        assert mine.rows[step].keys() == row.keys()
        values = torch.tensor([[mine.rows[step][c], row[c]] for c in row], dtype=torch.float64)
        assert torch.equal(values[:, 0].view(torch.int64), values[:, 1].view(torch.int64)), step


FACTORS = (1.0, 1.5, 1e30, 1.0)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_each_has_the_rows_of_a_training_alone(dropout):
    both = go(together(FACTORS, dropout))
    for by, mine in zip(FACTORS, both.locksteps, strict=True):
        assert_same_rows(mine, go(alone(by, dropout)))
    assert [a.blown_up_at for a in both.locksteps[2].arms if a.role == "candidate"] != [None, None]
    assert all(a.blown_up_at is None for a in both.arms if a.role != "candidate")


def test_the_reference_and_its_controls_run_once():
    counted = []
    both = together(FACTORS)
    for arm in both.arms:
        arm.module.register_forward_pre_hook(lambda module, args, name=arm.name: counted.append(name))
    both.forward_backward(0, *batch(0))
    both.update(0)
    assert {n: counted.count(n) for n in set(counted)} == {
        f"{role}.{dtype}": len(FACTORS) if role == "candidate" else 1
        for role in ("reference", "candidate", "control")
        for dtype in ("float32", "float64")
    }


def test_evaluations_are_those_of_a_training_alone():
    both, tested = go(together((1.0, 1.5)), stop=3), [batch(90), batch(91)]
    for by, mine in zip((1.0, 1.5), both.locksteps, strict=True):
        assert mine.evaluate(3, tested) == go(alone(by), stop=3).evaluate(3, tested)


def test_what_one_has_stored_goes_on_alone(tmp_path):
    both = go(together((1.0, 1.5), 0.4), stop=4)
    save_checkpoint(both.locksteps[1], 4, tmp_path)
    goes_on, whole = alone(1.5, 0.4), go(alone(1.5, 0.4))
    assert load_checkpoint(goes_on, tmp_path) == 4
    go(goes_on, 4)
    for step in goes_on.rows:
        assert goes_on.rows[step] == whole.rows[step]
