"""One module of each network in every arithmetic: right, wrong and narrow ones, by pass."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab.arithmetic.comparison import compare
from driftlab.arithmetic.passes import Recorded
from tests.driftlab.arithmetic.layers import FAULTS, Layer, call

PASSES = ["forward", "input gradient", "weight gradient", "buffer", "eval"]


def compared(candidate, reference=None, given=None, fold=dict, **options):
    return compare(reference or Layer(), candidate, given or call(), fold, **options)


def test_the_numbers_are_those_of_running_both_by_hand():
    x, g = torch.randn(7, 6), torch.randn(7, 5)
    mine, theirs = nn.Linear(6, 5), nn.Linear(6, 5)
    given = Recorded((x.clone().requires_grad_(),), gradients={"": g})
    found = {(d.pass_, d.name): d for d in compared(theirs, mine, given).differences}

    def by_hand(module, dtype):
        module, leaf = copy.deepcopy(module).to(dtype), x.detach().clone().to(dtype).requires_grad_()
        module(leaf).backward(g.to(dtype))
        return {
            ("forward", ""): module(leaf).detach(),
            ("input gradient", "0"): leaf.grad,
            ("weight gradient", "weight"): module.weight.grad,
            ("weight gradient", "bias"): module.bias.grad,
            ("eval", ""): module(leaf).detach(),
        }

    own, other = ({d: by_hand(m, d) for d in (torch.float32, torch.float64)} for m in (mine, theirs))
    assert found.keys() == own[torch.float64].keys()
    for key, d in found.items():
        truth = own[torch.float64][key]
        assert d.size == pytest.approx(float(truth.norm()))
        for name, dtype in [
            ("float32", torch.float32),
            ("float64", torch.float64),
            ("shadow", torch.float64),
        ]:
            apart = float((other[dtype][key].double() - own[dtype][key].double()).norm())
            assert d.apart[name] == pytest.approx(apart, rel=1e-6)
        for role, p in [("reference", own), ("candidate", other)]:
            error = float((p[torch.float32][key].double() - truth).norm())
            assert d.errors[role] == pytest.approx(error, rel=1e-6)


def test_a_copy_is_the_same_in_every_bit_of_every_pass():
    found = compared(Layer())
    assert found.same_bits
    assert found.wrong() == found.narrow() == []
    assert found.ran == ("float32", "float64", "shadow")
    assert list(dict.fromkeys(d.pass_ for d in found.differences)) == PASSES


@pytest.mark.parametrize("pass_", PASSES)
def test_a_fault_is_seen_first_in_its_pass(pass_):
    found = compared(Layer(**FAULTS[pass_]))
    passes = [PASSES.index(d.pass_) for d in found.wrong()]
    assert PASSES[passes[0]] == pass_
    assert passes == sorted(passes)
    assert not found.same_bits


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 36), st.sampled_from([-1, 1]))
def test_any_factor_is_wrong_down_to_the_threshold(bits, sign):
    found = compared(Layer(on_result=lambda y: y * (1 + sign * 2.0**-bits)))
    (forward, *_) = found.wrong()
    assert forward.relative == pytest.approx(2.0**-bits, rel=1e-3)


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(6)), st.integers(1, 5), st.integers(0, 2**31))
def test_another_order_of_the_same_sum_is_never_wrong_and_never_narrow(order, cut, seed):
    def otherwise(linear, x):
        w, x = linear.weight[:, order], x[:, order]
        return F.linear(x[:, cut:], w[:, cut:]) + F.linear(x[:, :cut], w[:, :cut], linear.bias)

    class Reordered(nn.Linear):
        def forward(self, x):
            return otherwise(self, x)

    torch.manual_seed(seed)
    mine, theirs = nn.Linear(6, 5), Reordered(6, 5)
    theirs.load_state_dict(mine.state_dict())
    found = compared(theirs, mine)
    assert found.wrong() == found.narrow() == []


def scaled_if(dtype):
    return lambda y: y * 1.001 if y.dtype == dtype else y


def through_numpy(y):
    return y + torch.from_numpy(0 * y.detach().numpy())


@pytest.mark.parametrize(
    ("on_result", "ran", "wrong", "honoured"),
    [
        (scaled_if(torch.float32), "float32 float64 shadow", True, True),
        (scaled_if(torch.float64), "float32 float64 shadow shadow64", True, True),
        (lambda y: y.float().to(y.dtype), "float32 float64 shadow shadow64", False, False),
        (lambda y: y.bfloat16().to(y.dtype), "float32 float64 shadow shadow64", False, False),
        (through_numpy, "float32 float64", False, True),
        (lambda y: through_numpy(y) * 1.001, "float32 float64", True, True),
        (lambda y: F.linear(y, torch.eye(5)), "float32 shadow", False, True),
        (lambda y: F.linear(y, 1.001 * torch.eye(5)), "float32 shadow", True, True),
    ],
    ids=[
        "another function in float32",
        "another function in float64",
        "float32 whatever it is given",
        "bfloat16 whatever it is given",
        "right, not in shadow",
        "wrong, not in shadow",
        "right, not in float64",
        "wrong, not in float64",
    ],
)
def test_what_each_arithmetic_says_decides_together(on_result, ran, wrong, honoured):
    found = compared(Layer(on_result=on_result))
    assert found.ran == tuple(ran.split())
    assert bool(found.wrong()) is wrong
    assert found.float64_not_honoured is not honoured
    left_out = {"float32", "float64", "shadow"} - set(found.ran)
    assert set(found.failed) == left_out
    assert all("Error: " in message for message in found.failed.values())


def test_fewer_bits_are_narrow_and_not_wrong():
    found = compared(Layer(on_result=lambda y: y.bfloat16().to(y.dtype)))
    assert found.wrong() == []
    assert {d.pass_ for d in found.narrow()} >= {"forward", "eval"}
    assert all(2**11 < d.lost < 2**18 for d in found.narrow())


def test_what_is_wrong_is_not_narrow_too():
    found = compared(Layer(on_result=lambda y: 1.01 * y.bfloat16().to(y.dtype)))
    wrong, narrow = ({(d.pass_, d.name) for d in some} for some in (found.wrong(), found.narrow()))
    assert ("forward", "") in wrong
    assert not wrong & narrow


def test_overflow_in_the_candidate_alone_is_wrong():
    huge = compared(Layer(on_result=lambda y: y * 1e30 * 1e30 / 1e30 / 1e30))
    assert {d.pass_ for d in huge.wrong()} >= {"forward"}
    assert huge.wrong()[0].overflows
    both = Layer(on_result=lambda y: y * 1e30 * 1e30)
    assert compared(copy.deepcopy(both), both).wrong() == []
