"""Calls with what nobody should give them: a verdict or one line, and nothing of the caller's changed."""

import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab import Verdict, assert_equivalent, diagnose
from driftlab.threads import threads_for
from tests.driftlab.handed_over import around, line
from tests.driftlab.hostile import (
    ASSERTED,
    JUDGED,
    REFUSED,
    batches,
    endless,
    identity,
    inputs,
    network,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
USUAL = {"reference": network, "candidate": lambda: identity, "batches": batches, "steps": lambda: 2}
ONE_INPUT = {"reference": network, "candidate": lambda: identity, "inputs": inputs}
LINES = [(role, *row) for role, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("role", "make", "says"), LINES, ids=[f"{r}-{says[:40]}" for r, _, says in LINES])
def test_what_cannot_be_asked_is_told_in_a_line(role, make, says):
    found = line(around(diagnose, USUAL | {role: make}))
    assert re.search(says, found), found


@pytest.mark.parametrize("name", JUDGED)
def test_what_is_merely_odd_is_judged(name):
    odd, verdicts = JUDGED[name]
    assert around(diagnose, USUAL | odd).verdict in verdicts


@pytest.mark.parametrize("name", ASSERTED)
def test_an_assertion_holds_fails_or_says_why_it_cannot_be_asked(name):
    odd, error, says = ASSERTED[name]
    found = around(assert_equivalent, ONE_INPUT | odd)
    assert type(found).__name__ == (error or "NoneType"), found
    if error == "DiagnoseError":
        line(found)
    assert re.search(says, str(found)), found


def interrupted(*args):
    raise KeyboardInterrupt


def test_ctrl_c_goes_through():
    for call, usual in ((diagnose, USUAL), (assert_equivalent, ONE_INPUT)):
        with pytest.raises(KeyboardInterrupt):
            around(call, usual | {"candidate": lambda: interrupted})


def test_of_an_endless_stream_no_more_is_drawn_than_memory_holds():
    assert "give at most steps=" in line(
        around(diagnose, USUAL | {"batches": endless, "steps": lambda: 10**12})
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(context):
    with context():
        assert around(diagnose, USUAL).verdict == "bit_identical"
        assert around(assert_equivalent, ONE_INPUT) is None


def test_small_networks_are_computed_with_one_thread_and_the_callers_number_comes_back():
    wide = nn.Linear(5, 2**13)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert diagnose(network(), identity, batches(), steps=1).threads == 1
        for networks, asked, count in (
            ((network(),), None, 1),
            ((network(), wide), None, 2),
            ((wide,), 1, 1),
        ):
            with threads_for(batches(), *networks, threads=asked) as chosen:
                assert chosen == torch.get_num_threads() == count
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


KINDS = {role: st.sampled_from(rows).map(lambda row: row[0]) for role, rows in REFUSED.items()}
ODD = st.sampled_from(list(JUDGED.values())).map(lambda row: row[0])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.fixed_dictionaries({}, optional=KINDS), ODD)
def test_several_oddities_at_once_end_in_a_verdict_or_a_line(wrong, odd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = around(diagnose, USUAL | odd | wrong)
    assert isinstance(getattr(found, "verdict", None), Verdict) or line(found)
