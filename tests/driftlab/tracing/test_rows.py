"""Rows of padding, which one network has and the other leaves out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from driftlab.tracing.prints import prints
from driftlab.tracing.rows import Rows
from driftlab.tracing.shared_rows import kept_rows


@st.composite
def masked(draw):
    """Values [sequences, tokens, 5], and which tokens there are: most of them."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(2, 6)))
    count = shape[0] * shape[1]
    left_out = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count // 2))
    mask = torch.tensor([n not in left_out for n in range(count)]).view(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(*shape, 5, generator=generator, dtype=torch.float64), mask


@given(masked())
def test_what_is_packed_tells_which_rows_are_kept(case):
    values, mask = case
    rows, none = kept_rows([values], [values[mask]])
    assert none is None
    for later in (values.tanh(), values.unflatten(2, (5, 1)), values.flatten(0, 1) * 2):
        expected = later.unflatten(0, mask.shape) if later.shape[:2] != mask.shape else later
        assert torch.equal(rows.of(later), expected[mask])


@given(masked())
def test_the_candidates_may_be_those_that_are_more(case):
    values, mask = case
    none, rows = kept_rows([values[mask]], [values])
    assert none is None
    assert torch.equal(rows.of(values), values[mask])


@given(masked())
def test_in_any_order_and_with_the_tokens_first(case):
    values, mask = case
    few = values[mask].flip(0)
    rows, _ = kept_rows([values], [few])
    assert torch.equal(rows.of(values), few)
    if values.shape[0] != values.shape[1]:
        assert torch.equal(rows.of(values.transpose(0, 1)), few)


@given(masked())
def test_rows_are_put_where_they_were_taken(case):
    values, mask = case
    rows, _ = kept_rows([values], [values[mask]])
    changed = values.clone()
    rows.put(rows.of(values) + 1, changed)
    assert torch.equal(changed, values + mask[..., None])


@given(masked())
def test_equal_rows_are_taken_one_after_the_other(case):
    values, mask = case
    values = values[:, :, :1].expand(-1, -1, 5).round().clone()  # many are alike
    rows, _ = kept_rows([values], [values[mask]])
    if rows is not None:  # else all numbers are the same
        assert len(set(rows.kept.tolist())) == int(mask.sum())
        assert torch.equal(rows.of(values), values[mask])


@given(masked())
def test_others_are_no_rows_of_it(case):
    values, mask = case
    few = values[mask]
    few[0, 0] += 1e-3
    assert kept_rows([values], [few]) == (None, None)
    assert kept_rows([values], [values]) == (None, None)


def test_prints_tell_kept_rows_as_well():
    values, rows = torch.randn(3, 4, 5, dtype=torch.float64), Rows((3, 4), torch.tensor([0, 1, 7]))
    packed = values.flatten(0, 1)[[0, 1, 7]]
    found = prints(values, rows)
    assert found.kept.same(prints(packed))
    assert not found.same(prints(packed))
    assert prints(torch.randn(7, 5), rows).kept is None
