"""Statistics against scipy's own tests and against enumeration."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_1samp

from driftlab.verdict.statistics import clopper_pearson, equal_means, holm, mcnemar_exact, sign_flip_test

numbers = st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda x: round(x, 6))


@settings(deadline=None)
@given(st.lists(numbers, min_size=3, max_size=12), st.floats(1e-3, 1e3))
def test_equal_means_is_the_worse_of_two_one_sided_t_tests(differences, margin):
    assume(len(set(differences)) > 1)
    above = ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = ttest_1samp(differences, margin, alternative="less").pvalue
    assert equal_means(differences, margin) == pytest.approx(max(above, below), rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(st.lists(numbers, min_size=3, max_size=8), st.floats(0.1, 100), st.floats(1, 10))
def test_equality_is_symmetric_scales_and_is_easier_within_a_wider_margin(differences, margin, factor):
    assume(len(set(differences)) > 1)
    p = equal_means(differences, margin)
    assert equal_means([-d for d in differences], margin) == pytest.approx(p, rel=1e-6, abs=1e-12)
    assert equal_means([4 * d for d in differences], 4 * margin) == pytest.approx(p, rel=1e-6, abs=1e-12)
    assert equal_means(differences, factor * margin) <= p + 1e-12


def test_a_mean_on_the_margin_is_a_coin_toss():
    assert equal_means([0.0, 1.0, 2.0], 1.0) == pytest.approx(0.5)
    assert equal_means([-1.0, 0.0, 1.0], 1.0) == pytest.approx(0.5 - math.sqrt(3 / 5) / 2)


@pytest.mark.parametrize(
    ("differences", "margin", "p"),
    [
        ([], 1.0, 1.0),
        ([0.0, 0.0], 1.0, 1.0),
        ([0.0, 0.0, 0.0], 1.0, 0.0),
        ([0.5, 0.5, 0.5], 1.0, 0.0),
        ([1.0, 1.0, 1.0], 1.0, 1.0),
        ([-2.0, -2.0, -2.0], 1.0, 1.0),
        ([0.1, -0.1, 0.0], 0.0, 1.0),
        ([0.1, -0.1, 0.0], -1.0, 1.0),
    ],
)
def test_too_few_the_same_and_no_margin(differences, margin, p):
    assert equal_means(differences, margin) == p


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=9))
def test_mcnemar_against_counting_every_way_that_the_pairs_could_have_fallen(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    discordant = [a for a, b in pairs if a != b]
    seen = abs(sum(discordant) - len(discordant) / 2)
    ways = [sum(way) for way in itertools.product([0, 1], repeat=len(discordant))]
    extreme = sum(abs(count - len(discordant) / 2) >= seen for count in ways)
    assert mcnemar_exact(first, second) == pytest.approx(extreme / len(ways))


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (0, 1), (3, 3), (1, 8), (11, 2), (40, 17), (900, 1100)]
)
def test_mcnemar_against_scipy(first, second):
    outcomes = [True] * first + [False] * second
    expected = binomtest(first, first + second).pvalue if outcomes else 1.0
    assert mcnemar_exact(outcomes, [not a for a in outcomes]) == pytest.approx(expected, rel=1e-9)


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        mcnemar_exact([True], [True, False])


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), max_size=9))
def test_the_sign_flip_test_counts_every_pattern(sides):
    sums = [
        sum(s * x for s, x in zip(signs, sides, strict=True))
        for signs in itertools.product((1, -1), repeat=len(sides))
    ]
    expected = sum(abs(s) >= abs(sum(sides)) for s in sums) / len(sums)
    assert sign_flip_test(sides) == pytest.approx(expected)


def test_the_sign_flip_test_of_one_sided_seeds():
    assert sign_flip_test([1] * 10) == 2 * 2.0**-10
    assert sign_flip_test([0, 0]) == 1.0


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert list(holm({"a": 0.9, "b": 0.6})) == ["a", "b"]
    assert holm({"a": 0.9, "b": 0.6}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(("count", "n"), [(0, 1), (1, 1), (0, 20), (3, 7), (7, 20), (56, 56)])
def test_the_interval_of_a_share_is_clopper_and_pearsons(count, n):
    theirs = binomtest(count, n).proportion_ci(0.95, method="exact")
    assert clopper_pearson(count, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
