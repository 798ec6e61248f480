"""When a difference is rounding: the threshold, its scale, and what NaN and infinity do to it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftlab.arithmetic.difference import Difference, distance, same_values

NAN, INF = math.nan, math.inf
HALFWAY = 2.0**14.5
sizes = st.floats(1e-6, 1e6)


def difference(size=1.0, apart=0.0, errors=(0.0, 0.0), same=False):
    named = dict(zip(("reference", "candidate"), errors, strict=True))
    return Difference("forward", "0", size, {"shadow": apart}, named, same)


@given(sizes, st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1e-20, 1.0))
def test_the_excess_is_the_share_of_what_rounding_may_make(size, mine, theirs, apart):
    found = difference(size, apart, (mine * size, theirs * size))
    allowed = HALFWAY * max(2.0**-53 * size, 2.0**-29 * max(mine, theirs) * size)
    assert found.excess("shadow") == pytest.approx(apart / allowed, rel=1e-12)


@given(sizes, st.integers(-40, 40), st.floats(0, 1e-3), st.floats(1e-20, 1.0))
def test_units_do_not_matter(size, exponent, error, apart):
    unit = 2.0**exponent
    one, other = (difference(u * size, u * apart, (u * error, 0.0)) for u in (1.0, unit))
    assert one.excess("shadow") == other.excess("shadow")
    assert one.relative == other.relative
    assert one.lost == other.lost


@given(sizes, st.floats(0, 1))
def test_a_rounding_of_float64_passes_and_a_factor_of_float32s_own_unit_does_not(size, part):
    assert difference(size, part * 2**-52 * size, (2**-24 * size,) * 2).excess("shadow") < 1
    assert difference(size, (1 + part) * 2**-24 * size, (2**-24 * size,) * 2).excess("shadow") > 1


def test_an_ill_conditioned_quantity_is_given_the_room_that_its_float32_needs():
    assert difference(1.0, 1e-9, (1e-7, 1e-7)).excess("shadow") > 1
    assert difference(1.0, 1e-9, (1e-4, 1e-7)).excess("shadow") < 1
    assert difference(1.0, 1e-9, (1e-7, 1e-4)).excess("shadow") < 1


def test_no_difference_is_no_excess_and_one_where_nothing_is_allowed_is_infinite():
    assert difference(0.0, 0.0).excess("shadow") == 0
    assert difference(0.0, 1e-300).excess("shadow") == INF
    assert difference(1.0, 1.0).excess("float64") == 0  # which was not run
    assert difference(0.0, 1.0).relative == INF
    assert difference(0.0, 0.0).relative == 0


def test_overflow_in_the_candidate_alone_is_told_from_overflow_in_both():
    alone, both, mine = (difference(1.0, 1.0, e) for e in ((1e-7, INF), (INF, INF), (INF, 1e-7)))
    assert [d.overflows for d in (alone, both, mine)] == [True, False, False]
    assert alone.excess("shadow") > 1
    assert both.excess("shadow") == mine.excess("shadow") == 0


@given(sizes, st.floats(2**-24, 1e-2), st.floats(0, 20))
def test_lost_is_how_many_times_the_candidates_error_is_the_references(size, error, bits):
    worse = 2.0**bits
    assert difference(size, 0.0, (error * size, worse * error * size)).lost == pytest.approx(worse)
    exact = difference(size, 0.0, (0.0, worse * 2**-24 * size))
    assert exact.lost == pytest.approx(worse)  # nobody is asked for more than float32 has
    assert difference(size, 0.0, (error * size, 0.0)).lost == 0


def test_float32_alone_measures_no_loss():
    alone = Difference("forward", "0", 1.0, {"float32": 1.0}, {}, False)
    assert (alone.lost, alone.overflows, alone.relative) == (0.0, False, 1.0)


def test_shadow_is_what_relative_speaks_of_where_it_ran():
    apart = {"float32": 3.0, "float64": 2.0}
    assert Difference("forward", "0", 4.0, apart, {}, False).relative == 0.5
    assert Difference("forward", "0", 4.0, apart | {"shadow": 1.0}, {}, False).relative == 0.25


vectors = st.lists(st.sampled_from([0.0, 1.0, -2.5, 3e-5, NAN, INF, -INF]), min_size=1, max_size=5)


@given(vectors, vectors)
def test_the_distance_against_counting_entry_by_entry(a, b):
    total = 0.0
    for x, y in zip(a, b, strict=False):
        same = x == y or (math.isnan(x) and math.isnan(y))
        total += 0.0 if same else INF if math.isnan(x - y) else (x - y) ** 2
    expected = math.sqrt(total) if len(a) == len(b) else INF
    mine, theirs = (torch.tensor(v, dtype=torch.float64) for v in (a, b))
    assert distance(mine, theirs) == pytest.approx(expected)
    assert distance(theirs, mine) == pytest.approx(expected)
    assert same_values(mine, theirs) == (expected == 0)


def test_another_shape_is_no_rounding_and_no_overflow():
    apart = dict.fromkeys(("float32", "float64", "shadow"), INF)
    found = Difference("forward", "0", 1.0, apart, {"reference": 1e-7, "candidate": INF}, False)
    assert found.excess("shadow") == INF
    assert not found.overflows


def test_a_gradient_that_is_nothing_but_rounding_is_measured_by_those_beside_it():
    alone, beside = (
        Difference("weight gradient", "bias", 1e-17, {"shadow": 1e-16}, {}, False, scale)
        for scale in (0.0, 1.0)
    )
    assert alone.excess("shadow") > 1
    assert beside.excess("shadow") == pytest.approx(1e-16 / (HALFWAY * 2**-53))
