"""Chunks of a fixed size: the same bits for every batch size, nothing lost, refusals."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab import DiagnoseError
from driftlab.batch_invariance import batch_invariant

torch.set_num_threads(1)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(160, 5)]
    return nn.Sequential(*layers).to(dtype).eval()


def boards(count, dtype=torch.float32):
    return torch.rand(count, 2, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


@settings(deadline=None, max_examples=40)
@given(chunk=st.integers(1, 9), size=st.integers(1, 40), other=st.integers(1, 40))
def test_a_row_has_the_same_bits_in_every_batch(chunk, size, other):
    wrapped, x = batch_invariant(network(), chunk), boards(40)
    common = min(size, other)
    with torch.no_grad():
        assert torch.equal(wrapped(x[:size])[:common], wrapped(x[:other])[:common])


@settings(deadline=None, max_examples=20)
@given(chunk=st.integers(1, 7), size=st.integers(1, 20))
def test_is_the_module_on_chunks_filled_up_by_hand(chunk, size):
    module, x = network(), boards(size)
    expected = []
    for start in range(0, size, chunk):
        rows = [x[min(start + i, size - 1)] for i in range(chunk)]
        expected.append(module(torch.stack(rows))[: size - start])
    assert torch.equal(batch_invariant(module, chunk)(x), torch.cat(expected))


def test_other_rows_do_not_matter():
    wrapped, x = batch_invariant(network(), 4), boards(7)
    changed = torch.cat([x[:3], 5 - x[3:]])
    assert torch.equal(wrapped(x)[:3], wrapped(changed)[:3])


def test_chunks_of_one_do_not_know_a_place():
    wrapped, x = batch_invariant(network(), 1), boards(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(wrapped(x)[order], wrapped(x[order]))


def test_strides_and_alignment_do_not_matter():
    wrapped, x = batch_invariant(network(), 4), boards(7)
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    for same in (
        shifted,
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert torch.equal(wrapped(same), wrapped(x))


@pytest.mark.parametrize(("chunk", "size"), [(1, 3), (4, 3), (4, 8), (4, 9)])
def test_gradients_are_those_of_the_module(chunk, size):
    module = network(torch.float64)
    found = []
    for call in (module, batch_invariant(module, chunk)):
        x = boards(size, torch.float64).requires_grad_()
        module.zero_grad()
        call(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in module.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


class Nested(nn.Module):
    def forward(self, x, extra, scale=1.0):
        return {"sum": x + extra["more"] * scale, "pair": (x, [extra["more"]]), "note": "kept"}


def test_nested_inputs_and_outputs():
    x, more, scale = torch.rand(5, 2), torch.rand(5, 2), torch.tensor(3.0)
    found = batch_invariant(Nested().eval(), 2)(x, {"more": more}, scale=scale)
    assert torch.equal(found["sum"], x + more * 3)
    assert torch.equal(found["pair"][0], x)
    assert torch.equal(found["pair"][1][0], more)
    assert found["note"] == "kept"


def test_a_batch_without_rows():
    assert batch_invariant(network(), 4)(boards(0)).shape == (0, 5)


def test_rows_are_filled_up_with_rows_not_with_zeros():
    class Inverse(nn.Module):
        def forward(self, x):
            assert bool((x != 0).all())
            return 1 / x

    values, gradients = torch.rand(3, 2) + 1, []
    for module in (Inverse(), batch_invariant(Inverse().eval(), 8)):
        x = values.clone().requires_grad_()
        module(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_the_module_is_neither_copied_nor_changed():
    module = network()
    before = copy.deepcopy(module.state_dict())
    wrapped = batch_invariant(module, 3)
    wrapped(boards(5))
    assert wrapped.module is module
    assert not wrapped.training
    assert all(torch.equal(t, module.state_dict()[n]) for n, t in before.items())


def test_a_part_that_is_kept_in_train_mode_on_purpose_stays_so():
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout()).eval()
    module[1].train()
    assert not batch_invariant(module, 3).training
    assert module[1].training


class Told(nn.Module):
    """Beside its tensor, something of the batch that is no tensor."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def forward(self, x):
        return x, self.tell(x)


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


def bare_norm():
    return nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False))


def norm_left_training():
    module = network()
    module[1].train()
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: batch_invariant(network().train()), "the module is in train mode"),
        (
            lambda: batch_invariant(norm_left_training()),
            r"1 \(BatchNorm2d\) takes its statistics from the batch",
        ),
        (
            lambda: batch_invariant(bare_norm().eval()),
            r"0 \(BatchNorm2d\) takes its statistics from the batch",
        ),
        (lambda: batch_invariant(network(), 0), "chunk=0: give a whole number, 1 or more"),
        (lambda: batch_invariant(network(), "a"), "chunk='a': give a whole number, 1 or more"),
        (lambda: batch_invariant(None), "module is a NoneType: give a torch.nn.Module"),
        (lambda: batch_invariant(network(), True), "chunk=True: give a whole number"),
        (lambda: batch_invariant(Total().eval(), 2)(torch.rand(4, 3)), "has no row for each of the 2 inputs"),
        (
            lambda: batch_invariant(Told(lambda x: x.numpy()).eval(), 2)(torch.rand(4, 3)),
            "type ndarray cannot",
        ),
        (lambda: batch_invariant(Told(lambda x: float(x[0])).eval(), 2)(torch.rand(4)), "type float cannot"),
        (lambda: batch_invariant(Total().eval())(torch.tensor(1.0)), "the inputs have no rows"),
        (
            lambda: batch_invariant(Nested().eval())(torch.rand(4, 2), {"more": torch.rand(3, 2)}),
            "the inputs have 3 and 4 rows",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(DiagnoseError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_refuses_when_it_was_put_in_train_mode_afterwards():
    wrapped = batch_invariant(network(), 4).train()
    with pytest.raises(ValueError, match="train mode"):
        wrapped(boards(4))
