"""Changes that keep the numbers and give them in another order; norms of several calls together."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from driftlab.mistakes.frontier import Frontier
from driftlab.mistakes.mutations import averaged, mutations, normed_together
from driftlab.mistakes.orders import ORDERS, moved_on
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.prints import Seen, prints

REPEAT = torch.Tensor.repeat
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def made(call):
    return {words: make() for operator in ORDERS for words, make in mutations(call, [], operator)}


def filled(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@given(SIZES, st.sampled_from(["flatten", "reshape", "transpose", "stack", "repeat"]), st.data())
def test_all_of_them_keep_the_numbers(shape, name, data):
    x = filled(*shape)
    dims = st.integers(0, len(shape) - 1)
    call = {
        "flatten": lambda: Call(torch.flatten, (x, data.draw(dims)), {}),
        "reshape": lambda: Call(torch.reshape, (x, data.draw(st.permutations(shape))), {}),
        "transpose": lambda: Call(torch.transpose, (x, data.draw(dims), data.draw(dims)), {}),
        "stack": lambda: Call(torch.stack, ([x, -x],), {}),
        "repeat": lambda: Call(REPEAT, (x, [2] + [1] * (len(shape) - 1)), {}),
    }[name]()
    wanted = call.run().flatten().sort().values
    for words, other in made(call).items():
        assert torch.equal(other.flatten().sort().values, wanted), words


def test_dimensions_are_split_and_merged_in_the_other_order():
    x = filled(2, 12, 3)
    other = made(Call(torch.unflatten, (x, 1, (3, 4)), {}))[
        "dimensions 1 and 2 of `unflatten` in the other order"
    ]
    for channel in range(12):
        assert torch.equal(other[:, channel % 3, channel // 3], x[:, channel])
    x = filled(2, 3, 4)
    other = made(Call(torch.flatten, (x, 1), {}))["dimensions 1 and 2 exchanged before `flatten`"]
    assert torch.equal(other, torch.stack([x[:, i, j] for j in range(4) for i in range(3)], 1))


def test_a_reshape_that_neither_splits_nor_merges_has_no_such_change():
    assert not [
        words for words in made(Call(torch.reshape, (filled(3, 4), (1, 3, 4)), {})) if "order" in words
    ]


def test_pixels_of_channels_that_come_last():
    x, by = filled(1, 12, 2, 2), 2
    other = made(Call(torch.pixel_shuffle, (x, by), {}))["the channels of `pixel_shuffle` last"]
    for colour in range(3):
        for row in range(4):
            for column in range(4):
                channel = ((row % by) * by + column % by) * 3 + colour  # depth to space, as TensorFlow has it
                assert other[0, colour, row, column] == x[0, channel, row // by, column // by]


def test_copies_side_by_side_and_one_after_another():
    x = filled(3)
    other = made(Call(torch.repeat_interleave, (x, 2), {}))["`repeat` for `repeat_interleave`"]
    assert other.tolist() == [0, 1, 2, 0, 1, 2]
    other = made(Call(REPEAT, (x, (2,)), {}))["`repeat_interleave` for `repeat`"]
    assert other.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 2, 3)])
def test_a_batch_norm_of_two_calls_together(shape):
    one, other = torch.randn(shape).double(), 1 + 2 * torch.randn(3, *shape[1:]).double()
    weight, bias = torch.rand(2, 4).double()
    calls = {
        n: Call(F.batch_norm, (x, None, None, weight, bias, True), {}) for n, x in ((7, one), (9, other))
    }
    wanted = F.batch_norm(torch.cat([one, other]), None, None, weight, bias, True)
    found = normed_together(calls)
    torch.testing.assert_close(torch.cat([found[7], found[9]]), wanted)


def test_a_group_norm_of_two_sizes_together():
    one, other = torch.randn(2, 4, 3, 3).double(), torch.randn(2, 4, 5).double()
    calls = {n: Call(F.group_norm, (x, 2), {}) for n, x in enumerate((one, other))}
    rows = torch.cat([one.flatten(2), other], 2).unflatten(1, (2, 2)).flatten(2)
    wanted = (rows - rows.mean(2, True)) / (rows.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    wanted = wanted.unflatten(2, (2, -1)).flatten(1, 2)
    torch.testing.assert_close(normed_together(calls)[0], wanted[:, :, :9].reshape(one.shape))
    torch.testing.assert_close(normed_together(calls)[1], wanted[:, :, 9:])


def test_one_call_has_no_other_to_share_with():
    assert normed_together({1: Call(F.group_norm, (torch.randn(2, 4, 3), 2), {})}) is None


def test_counts_are_what_is_divided_by_and_differs():
    sums, counts = torch.randn(3, 2), torch.tensor([[1], [2], [4]])
    torch.testing.assert_close(averaged(Call(torch.div, (sums, counts), {}))(1.5), sums / 6)
    for other in (torch.tensor([[3], [3], [3]]), torch.tensor([[0.5], [1], [2]]), torch.tensor(3)):
        assert averaged(Call(torch.div, (sums, other), {})) is None


def test_the_frontier_is_what_the_other_has_and_does_not_go_on_with():
    seen, x = Seen(), torch.randn(6, 2)
    for number, value in enumerate((x.exp(), x.exp().flip(0))):  # the other has it in reverse
        seen.add(prints(value), number)
    frontier = Frontier(seen)
    a = frontier.watch(1, Call(torch.exp, (x,), {}), [])
    b = frontier.watch(2, Call(torch.reshape, (a, (3, 4)), {}), [])
    frontier.watch(3, Call(torch.cumsum, (b, 1), {}), [])
    assert frontier.calls() == {1: True, 2: True}


def test_a_mask_is_moved_on_with_its_edge_once_more():
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = {words: moved.tolist() for words, moved in moved_on(mask)}
    assert found == {
        "moved on by one": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        "moved back by one": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]],
    }
    assert not list(moved_on(2 * mask))
    assert not list(moved_on(torch.ones(())))
