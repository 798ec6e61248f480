"""The laws of finite differences against differences taken, and the advice that is made of them."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from driftlab.finite.prediction import UNITS, Law, advice, spacing

TYPES = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
# f, f', f'', f''' in exact arithmetic, at any Fraction
CLOSED = {
    "a cube": (lambda x: x**3, lambda x: 3 * x**2, lambda x: 6 * x, lambda x: Fraction(6)),
    "an inverse": (lambda x: 1 / x, lambda x: -1 / x**2, lambda x: 2 / x**3, lambda x: -6 / x**4),
    "a quartic": (lambda x: x**4 - x, lambda x: 4 * x**3 - 1, lambda x: 12 * x**2, lambda x: 24 * x),
}
some_law = st.builds(
    Law,
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from([1, 2]),
)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("point", [Fraction(1, 2), Fraction(3), Fraction(-7, 4)])
def test_truncation_is_what_an_exact_difference_is_off_by(name, point, sides):
    f, slope, second, third = CLOSED[name]
    step = Fraction(1, 2**20)
    behind = point if sides == 1 else point - step
    off = (f(point + step) - f(behind)) / (sides * step) - slope(point)
    law = Law(0.0, float(abs(second(point) if sides == 1 else third(point))), "float64", sides)
    assert law.truncation(float(step)) == pytest.approx(float(abs(off)), rel=1e-5, abs=1e-15)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_round_off_is_the_size_of_what_rounding_the_loss_leaves(dtype, sides):
    """A loss that is linear in the number: nothing is off but the two roundings."""
    rounded, step, loss = TYPES[dtype], 2.0**-3, 2.0**10 + 2.0**9
    law = Law(loss, 0.0, dtype, sides)
    slopes = np.linspace(0.1, 9.7, 400)
    behind = 0.0 if sides == 1 else -step
    ends = [rounded(loss + slopes * at).astype(np.float64) for at in (step, behind)]
    off = np.abs((ends[0] - ends[1]) / (sides * step) - slopes)
    # each of the roundings is off by a unit of the loss at most; of two, one may be exact
    assert law.round_off(step) / 4 < off.max() <= 2 * law.round_off(step)


@given(some_law)
def test_the_best_step_has_the_least_error(law):
    best = law.error(law.best_step)
    steps = law.best_step * np.geomspace(1e-3, 1e3, 601)
    least = min(law.error(h) for h in steps)
    assert best <= least * (1 + 1e-12)
    assert best == pytest.approx(least, rel=1e-3)
    branches = law.truncation(law.best_step), law.round_off(law.best_step)
    assert branches[1] == pytest.approx(branches[0] * law.sides, rel=1e-9)


@given(some_law, st.floats(0.01, 100))
def test_error_is_the_sum_of_its_branches(law, factor):
    step = law.best_step * factor
    assert law.error(step) == law.truncation(step) + law.round_off(step)
    assert law.error(step) == Law(-law.loss, law.curvature, law.dtype, law.sides).error(step)


@pytest.mark.parametrize("sides", [1, 2])
def test_without_truncation_no_step_is_too_large(sides):
    law = Law(3.0, 0.0, "float32", sides)
    assert law.best_step == math.inf
    assert law.error(math.inf) == 0
    assert law.error(1e6) == law.round_off(1e6) > 0


@pytest.mark.parametrize("sides", [1, 2])
def test_without_round_off_no_step_is_too_small(sides):
    law = Law(0.0, 3.0, "float32", sides)
    assert law.best_step == 0
    assert law.error(0.0) == 0
    assert law.error(1e-3) == law.truncation(1e-3) > 0


@pytest.mark.parametrize(
    ("function", "second"), [(np.exp, np.exp), (np.sin, np.sin), (np.log, lambda x: x**-2)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_predicted_best_step_is_where_taken_differences_are_best(function, second, dtype):
    """By median over points, a loss of 1 beside the function: within a decade, and no better elsewhere."""
    rounded, points = TYPES[dtype], np.linspace(0.8, 1.4, 200)
    slope = {np.exp: np.exp, np.sin: np.cos, np.log: lambda x: 1 / x}[function](points)
    law = Law(float(np.median(1 + function(points))), float(np.median(np.abs(second(points)))), dtype)
    steps = law.best_step * 10.0 ** np.arange(-3, 3.5, 0.5)

    def loss(x):
        return (1 + function(x)).astype(rounded).astype(np.float64)

    wide = points.astype(np.longdouble)
    errors = [float(np.median(np.abs((loss(wide + h) - loss(wide)) / np.float64(h) - slope))) for h in steps]
    assert abs(math.log10(steps[int(np.argmin(errors))] / law.best_step)) <= 1
    predicted = law.error(law.best_step)
    assert predicted / 10 < min(errors) < 3 * predicted
    for step, error in zip(steps, errors, strict=True):
        assert law.error(step) / 20 < error < 3 * law.error(step)


@given(st.sampled_from(sorted(TYPES)), st.integers(-13, 14), st.integers(0, 2**52 - 1), st.booleans())
def test_spacing_is_that_of_numpy(dtype, exponent, mantissa, negative):
    value = TYPES[dtype](math.ldexp(1 + mantissa / 2**52, exponent))
    assume(np.isfinite(value))
    assert spacing(-float(value) if negative else float(value), dtype) == np.spacing(value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("exponent", [-100, -1, 0, 1, 30, 52, 53, 100])
def test_spacing_next_to_a_power_of_two(dtype, exponent):
    power = TYPES[dtype](2.0**exponent)
    for value in (power, np.nextafter(power, TYPES[dtype](0)), np.nextafter(power, TYPES[dtype](np.inf))):
        assert spacing(float(value), dtype) == np.spacing(value)


def test_spacing_of_bfloat16_is_two_to_the_sixteenth_of_float32s():
    assert spacing(3.0, "bfloat16") == 2**16 * spacing(3.0, "float32")


def test_spacing_of_zero_is_zero():
    assert spacing(0.0, "float32") == 0.0


def percentages(text):
    return [float(p) for p in re.findall(r"off by ([\d.e+-]+) %", text)]


def test_advice_for_the_loss_of_the_thread():
    words = advice(1.2e4, 1.0, 0.5, 1e-3)  # predicted: "your loss is 1.2e4 and moves by 1e-3"
    assert "is 1.2e+04 and moves by 0.001; float32 numbers of that size lie 0.001 apart" in words
    assert "hardly a digit" in words or "no digit" in words
    wide, best = percentages(words)
    assert wide == pytest.approx(100 * Law(1.2e4, 0.5, "float64").error(1e-3), rel=0.05)
    narrow = Law(1.2e4, 0.5, "float32")
    assert f"eps = {narrow.best_step:.1g} in float32" in words
    assert best == pytest.approx(100 * narrow.error(narrow.best_step), rel=0.05)


@pytest.mark.parametrize(
    ("loss", "said"), [(1e6, "leaves no digit"), (1.0, "leaves about 3.9 digits"), (1.2e4, "hardly a digit")]
)
def test_the_digits_that_are_left_are_counted(loss, said):
    derivative = 1.1 if loss == 1.2e4 else 1.0
    assert said in advice(loss, derivative, 0.5, 1e-3)


def test_float64_is_not_advised_where_truncation_sets_the_error():
    words = advice(1.0, 1.0, 5.0, 1e-2)
    assert "Use float64" not in words
    assert "truncation" in words
    assert "eps = " in words  # a smaller one


def test_a_linear_loss_is_told_to_take_a_larger_step():
    words = advice(1e5, 1.0, 0.0, 1e-3)
    assert "inf" not in words
    assert "larger" in words


def test_a_loss_of_zero_has_all_its_digits():
    words = advice(0.0, 1.0, 0.5, 1e-3)
    assert "no digit" not in words
    assert "eps = 0 " not in words


def test_a_loss_that_does_not_move_is_said():
    words = advice(3.0, 0.0, 0.5, 1e-3)
    assert "%" not in words
    assert "does not move" in words or "absolute" in words


@settings(max_examples=200)
@given(
    st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.floats(-1e9, -1e-9)),
    st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.floats(-1e9, -1e-9)),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e3)),
    st.floats(1e-12, 1),
)
def test_advice_never_says_a_number_that_is_none(loss, derivative, curvature, step):
    words = advice(loss, derivative, curvature, step)
    assert not re.search(r"\b(nan|inf)\b", words)
    assert words.endswith(".")
