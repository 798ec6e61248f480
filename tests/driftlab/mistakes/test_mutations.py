"""Changes of one call: what they leave alone."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from driftlab.mistakes.mutations import SETTINGS, mutations, numbered
from driftlab.mistakes.operands import OPERANDS, Given
from driftlab.mistakes.torch_call import Call


class Kept(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(Call(func, tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def made(call):
    """The changed calls, where a change is another operand."""
    changes = (make for operator in (*SETTINGS, *OPERANDS) for _, make in mutations(call, [], operator))
    return [make.changed for make in changes if isinstance(make, Given)]


def integers(call):
    return [t for t in call.tensors if not t.is_floating_point()]


def test_the_lengths_of_a_recurrent_layer_are_left_alone():
    # its kernel trusts them: others were seen to corrupt the process's memory
    packed = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
    with Kept() as kept:
        torch.nn.LSTM(4, 4)(packed)
    call = next(c for c in kept.calls if c.name == "lstm")
    assert integers(call)
    assert made(call)
    for other in made(call):
        for mine, theirs in zip(integers(call), integers(other), strict=True):
            assert torch.equal(mine, theirs)


def test_positions_and_masks_are_changed_where_they_are_checked():
    call = Call(torch.ge, (torch.arange(4), torch.arange(4).flip(0)), {})
    assert len(made(call)) == 6
    call = Call(torch.where, (torch.tensor([True, False]), torch.ones(2), torch.zeros(2)), {})
    assert any(torch.equal(other.tensors[0], ~call.tensors[0]) for other in made(call))


def test_what_draws_and_what_moves_is_left_alone():
    assert not made(Call(torch.dropout, (torch.ones(4), 0.5, True), {}))
    assert not made(Call(torch.reshape, (torch.ones(4, 4), (16,)), {}))


def test_the_number_of_an_attention_is_its_scale():
    query = torch.randn(2, 3, 4)
    call = Call(torch.nn.functional.scaled_dot_product_attention, (query, query, query), {})
    torch.testing.assert_close(numbered(call)(1.0), call.run())
    torch.testing.assert_close(numbered(call)(0.0), query.mean(1, keepdim=True).expand(2, 3, 4))


def test_a_variance_is_corrected_or_not():
    x = torch.randn(5, 7, dtype=torch.float64)

    def changed(*call):
        both = (m for operator in SETTINGS for m in mutations(Call(*call), [], operator))
        return {words: make() for words, make in both if " over n" in words}

    over = {"`var` over n, not n - 1": 0, "`var` over n - 1, not n": 1}
    for words, correction in over.items():
        found = changed(torch.var, (x, 1), {"correction": 1 - correction})[words]
        torch.testing.assert_close(found, x.var(1, correction=correction))
    found = changed(torch.std_mean, (x, 0), {"correction": 1})["`std_mean` over n, not n - 1"]
    torch.testing.assert_close(found, torch.std_mean(x, 0, correction=0))
    away = (x - x.mean(1, keepdim=True)).square()
    found = changed(torch.mean, (away, 1), {})["`mean` over n - 1, not n"]
    torch.testing.assert_close(found, x.var(1))
    assert not changed(torch.mean, (x[:1, :1], 1), {})


@pytest.mark.parametrize(
    ("index", "other"),
    [
        (slice(None, -1), (slice(1, None),)),
        ((Ellipsis, slice(2)), (Ellipsis, slice(3, None))),
        ((slice(None), None, slice(1, 3)), (slice(None), None, slice(2, 4))),
        ((slice(None), slice(1, 4)), (slice(None), slice(1, 4))),
        ((None, 0, Ellipsis, slice(3, None)), (None, 0, Ellipsis, slice(None, 2))),
        ((slice(1, None), 2), (slice(None, -1), 2)),
    ],
)
def test_a_slice_may_leave_out_the_other_end(index, other):
    x = torch.arange(20.0).reshape(4, 5)
    call = Call(torch.Tensor.__getitem__, (x, index), {})
    made = [make() for words, make in mutations(call, [], OPERANDS[-1]) if "other end" in words]
    assert all(m.shape == x[index].shape for m in made)
    different = not torch.equal(x[other], x[index])
    assert len(made) == different
    assert not different or torch.equal(made[0], x[other])


def test_a_slice_that_leaves_out_nothing_has_no_other_end():
    x = torch.zeros(4, 5)
    for index in (slice(None), (slice(None, None, 2),), 1, torch.tensor([True, False, True, True])):
        assert not list(mutations(Call(torch.Tensor.__getitem__, (x, index), {}), [], OPERANDS[-1]))
