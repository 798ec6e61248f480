import copy
import json
import re
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from driftlab.report.sections import as_files, in_page, shown
from driftlab.verdict.rules import judge
from driftlab.words import Verdict
from experiments.split_gradient.answer import answer
from experiments.split_gradient.case import LAYOUTS, Case, draw, draw_as_asked, read_case, with_53_bits
from experiments.split_gradient.laws import law_in_words, slope
from experiments.split_gradient.literal import DTYPES, measure_literal
from experiments.split_gradient.measure import about, measure
from experiments.split_gradient.passes import (
    PASSES,
    bound,
    distance,
    exact,
    magnitudes,
    passes,
    terms,
    ulp,
    unit_round_off,
    whole,
)
from experiments.split_gradient.sweep import blocked, cases, left_to_right, measure_controls
from suite.command.errors import ConfigurationError
from tests.suite.conftest import ROOT, set_anew

SMALL = Case(in_channels=2, out_channels=5, kernel_size=2, split=(1, 3, 1), batch=2, image_size=3)


def configured(*overrides, scale="smoke"):
    config = OmegaConf.load(ROOT / "conf/experiment/split_gradient.yaml")
    config.merge_with({"device": "cpu", "scale": {"name": scale}})
    config.merge_with_dotlist(list(overrides))
    return config


@pytest.fixture(scope="module")
def asked():
    return measure(configured(), seed=0)


@pytest.fixture(scope="module")
def values(asked):
    """Three seeds, as they come back from the disk."""
    found = {0: asked.values} | {seed: measure(configured(), seed).values for seed in (1, 2)}
    return {seed: json.loads(json.dumps(v)) for seed, v in found.items()}


def sums(case, operands):
    """pass -> index of an element -> the pairs of factors that it is the sum of: the definition, in loops."""
    w, x, g = (t.tolist() for t in (operands.weight, operands.inputs, operands.gradient))
    found = {p: {} for p in PASSES}
    channels, kernel = range(case.in_channels), range(case.kernel_size)
    places = product(range(case.batch), range(case.out_channels), *[range(case.output_size)] * 2)
    for (n, o, i, j), c, a, b in product(places, channels, kernel, kernel):
        weight, inputs, gradient = w[o][c][a][b], x[n][c][i + a][j + b], g[n][o][i][j]
        found["forward"].setdefault((n, o, i, j), []).append((weight, inputs))
        found["weight gradient"].setdefault((o, c, a, b), []).append((gradient, inputs))
        found["input gradient"].setdefault((n, c, i + a, j + b), []).append((gradient, weight))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [[5], [1, 4], [1, 3, 1]])
def test_passes_are_the_sums_of_the_definition(sizes, layout):
    operands = draw(SMALL, 0, "zero mean").to(torch.float64, layout=layout)
    found = passes(operands, sizes)
    for p, elements in sums(SMALL, operands).items():
        for index, pairs in elements.items():
            assert float(found[p][index]) == pytest.approx(sum(a * b for a, b in pairs), abs=1e-14)


def test_terms_and_magnitudes_count_and_add_up_what_the_definition_sums():
    operands = draw(SMALL, 0, "zero mean")
    count, magnitude = terms(operands), magnitudes(operands)
    for p, elements in sums(SMALL, operands).items():
        assert count[p].numel() == len(elements)
        for index, pairs in elements.items():
            assert float(count[p][index]) == len(pairs)
            assert float(magnitude[p][index]) == pytest.approx(sum(abs(a * b) for a, b in pairs))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.integers(-30, 30), data=st.sampled_from(["zero mean", "positive"]))
def test_distance_from_exact_is_that_of_rational_arithmetic(seed, scale, data):
    operands = with_53_bits(draw(SMALL, seed, data), seed).map(lambda t: t * 2.0**scale)
    found, truth = whole(operands), exact(operands)
    for p, elements in sums(SMALL, operands).items():
        apart = distance(found[p], truth[p])
        for index, pairs in elements.items():
            right = sum(Fraction(a) * Fraction(b) for a, b in pairs)
            error = abs(Fraction(float(found[p][index])) - right)
            assert float(apart[index]) == pytest.approx(float(error), rel=1e-6, abs=0)


def test_digits_below_float32_change_nothing_in_float32():
    drawn = draw_as_asked(SMALL, 3)
    filled = with_53_bits(drawn, 3)
    assert torch.equal(filled.weight.float(), drawn.weight)
    assert torch.equal(filled.inputs.float(), drawn.inputs)
    assert not torch.equal(filled.weight, drawn.weight.double())
    assert torch.equal(filled.gradient, torch.ones_like(filled.gradient))


@pytest.mark.parametrize("dtype", list(dict.fromkeys(DTYPES.values())), ids=str)
def test_ulp_is_the_gap_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 1.99, 2.0, 19.3, 3e-3, -7.0, -1e-4]).to(dtype)
    gap = torch.nextafter(values.abs(), torch.full_like(values, torch.inf)).double() - values.abs().double()
    assert torch.equal(ulp(values, dtype), gap)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 200), data=st.sampled_from(["zero mean", "positive"]))
def test_no_two_orders_of_a_sum_are_further_apart_than_the_bound(seed, length, data):
    case = Case(length, 2, 1, (1, 1), 1, 1)
    operands = draw(case, seed, data)
    factors = operands.weight[0].flatten() * operands.inputs.flatten()
    shuffled = factors[torch.randperm(length, generator=torch.Generator().manual_seed(seed))]
    apart = abs(
        float(left_to_right(factors.numpy()[:, None])[0]) - float(left_to_right(shuffled.numpy()[:, None])[0])
    )
    magnitude, count = (f(operands)["forward"].flatten()[0] for f in (magnitudes, terms))
    assert count == length
    assert apart <= float(bound(case, "forward", magnitude, count, torch.float32))


def test_bound_promises_nothing_where_it_does_not_exist():
    case = Case(1, 600, 1, (1,) * 600, 1, 1)
    count = torch.tensor([600.0], dtype=torch.float64)
    magnitude = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = bound(case, "input gradient", magnitude, count, torch.bfloat16)
    assert found.tolist() == [0.0, float("inf")]


def test_bound_of_16_bits_is_one_rounding_on_each_side_of_the_forward_pass():
    case = Case(1, 2, 1, (1, 1), 1, 1)
    one = torch.ones(1, dtype=torch.float64)
    u = unit_round_off(torch.bfloat16)
    assert float(bound(case, "forward", one, one, torch.bfloat16)) == pytest.approx(2 * u, rel=0.01)


def test_control_sums_add_in_the_order_they_say():
    numbers = np.random.default_rng(0).random((45, 3), dtype=np.float32)
    one_by_one = np.zeros(3, np.float32)
    for row in numbers:
        one_by_one = one_by_one + row
    assert (left_to_right(numbers) == one_by_one).all()
    lanes = [left_to_right(numbers[first::16]) for first in range(16)]
    while len(lanes) > 1:
        lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    assert (blocked(numbers) == lanes[0]).all()


def test_left_to_right_sums_follow_the_probabilistic_laws():
    rows = [r for r in measure_controls(0, "small") if r["order"] == "left to right"]
    for data, law in (("positive", 0.5), ("zero mean", 0.0)):
        chosen = [r for r in rows if r["data"] == data]
        fitted = slope([r["terms"] for r in chosen], [r["rms_whole"] for r in chosen])
        assert fitted["exponent"] == pytest.approx(law, abs=0.06)


@given(exponent=st.floats(-2, 2), constant=st.floats(1e-3, 1e3))
def test_slope_recovers_a_power_law(exponent, constant):
    lengths = [2.0**n for n in range(3, 12)]
    fitted = slope(lengths, [constant * k**exponent for k in lengths])
    assert fitted["exponent"] == pytest.approx(exponent, abs=1e-9)
    assert fitted["constant"] == pytest.approx(constant, rel=1e-6)


def test_slope_leaves_out_zeros_and_refuses_what_is_too_little():
    lengths = [2.0**n for n in range(10)]
    assert slope(lengths, [0.0, *lengths[1:]])["n"] == 9
    assert slope(lengths, [0.0] * 5 + [1.0] * 5) is None
    assert slope([8.0] * 10, lengths) is None


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((0.5, 0.4, 0.6), "√K"),
        ((0.1, -0.1, 0.3), "constant"),
        ((0.25, 0.2, 0.3), "between constant and √K"),
        ((0.48, 0.47, 0.49), "nearly √K"),
        ((-0.3, -0.4, -0.2), "falls with K"),
        ((0.8, 0.4, 1.2), "√K or K"),
        ((0.75, 0.7, 0.8), "between √K and K"),
        ((1.4, 1.3, 1.5), "steeper than K"),
    ],
)
def test_a_law_is_named_by_the_interval(interval, words):
    assert law_in_words(*interval) == words


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("case.split=[100,200]", "add up to 513"),
        ("case.split=[513,-1]", "add up to 513"),
        ("case.split=[-1,-1]", "two sizes or more"),
        ("case.split=[513]", "two sizes or more"),
        ("case.split=[0,513]", "two sizes or more"),
        ("case.split=7", "case.split=7 must be a list"),
        ("case.out_channels=1", "cannot be split"),
        ("case.out_channels=-3", "case.out_channels=-3 must be a whole number"),
        ("case.batch=1.5", "case.batch=1.5 must be a whole number"),
        ("case.kernel_size=4", "case.image_size=3 is smaller than case.kernel_size=4"),
        ("+case.depth=4", "case.depth is no setting"),
        ("window.steps=0", "window.steps=0"),
        ("window.learning_rate=0", "window.learning_rate=0"),
        ("sweep.batch=[]", "sweep.batch=[] is empty"),
        ("sweep.image_size=[2]", "sweep.image_size=2 does not fit"),
        ("sweep.base=3", "sweep.base=3 must hold in_channels"),
        ("sweep=3", "sweep=3 must hold base"),
        ("case=3", "case=3 must hold in_channels"),
        ("~window.learning_rate", "window.learning_rate is not set"),
        ("window.learning_rate=inf", "must be a finite number"),
    ],
)
def test_settings_that_fit_no_convolution_are_one_clear_line(override, says):
    with pytest.raises(ConfigurationError) as error:
        about(set_anew("split_gradient", override))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_may_be_many_and_one_may_be_the_rest():
    given = {"in_channels": 2, "kernel_size": 3, "batch": 4, "image_size": 8, "out_channels": 300}
    assert read_case(given | {"split": [100, -1, 50]}, "case").split == (100, 150, 50)


def test_smoke_takes_the_ends_of_the_sweep():
    ends, every = (cases(configured(scale=scale)) for scale in ("smoke", "small"))
    assert set(ends) - {read_case(configured().sweep.base, "base")} < set(every)
    assert {f for factors in ends.values() for f in factors} == {f for fs in every.values() for f in fs}


def test_the_plan_names_the_case():
    assert "Conv2d(2, 513, kernel_size=2, bias=False) split 1 + 512" in about(configured())


def test_the_case_of_the_thread(asked):
    rows = {(r["dtype"], r["pass"]): r for r in asked.values["literal"]["rows"]}
    assert {p for _, p in rows} == set(PASSES)
    assert rows["float32", "input gradient"]["terms"] == 513 * 4
    assert rows["float32", "weight gradient"]["terms"] == 4
    assert all(r["share"] <= 1 for r in rows.values())
    for p in PASSES[1:]:  # sums of float32 values times ones are exact in float64
        assert rows["float64", p]["difference"] == rows["float64", p]["error_whole"] == 0
    assert rows["float32", "input gradient"]["difference"] < 1e-4
    assert set(asked.values["integers"].values()) == {True}


def test_the_pair_in_training_is_round_off_or_the_same(asked):
    assert judge([asked.record]).verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert asked.record.found()


def test_measuring_again_gives_the_same_and_leaves_the_random_state(asked):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = measure(configured(), seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.values == asked.values


def test_no_comparison_of_the_sweep_lies_above_the_bound(values):
    assert all(row["share"] <= 1 for v in values.values() for row in v["sweep"])


def test_every_table_has_a_conclusion_and_every_figure_keeps_to_its_colours(values):
    found = answer(configured(), values)
    for table in found.tables:
        assert table.rows
        assert table.conclusion
        assert all(set(row) <= set(table.columns) for row in table.rows)
        assert "nan" not in str(shown(table)).lower()
    for figure in found.figures:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", in_page(figure))
        assert set(as_files(figure)) == {"svg", "png"}


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "case.out_channels=300",
            "case.split=[100,200]",
            "case.kernel_size=3",
            "case.batch=4",
            "case.image_size=9",
        ],
        ["case.out_channels=12", "case.split=[3,-1,4,1]", "case.in_channels=1", "case.kernel_size=1"],
        ["case.out_channels=2", "case.in_channels=1", "case.kernel_size=1", "case.image_size=1"],
    ],
)
def test_other_sizes_are_answered_without_the_expectations_of_the_thread(overrides):
    config = configured(*overrides)
    measured = measure(config, seed=4)
    found = answer(config, {4: json.loads(json.dumps(measured.values))})
    differences = found.tables[0]
    assert all(row["expected"] is None for row in differences.rows)
    assert "expects" not in differences.conclusion
    assert judge([measured.record]).verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def test_a_difference_on_integers_is_not_called_rounding(values):
    wrong = copy.deepcopy(values)
    wrong[1]["integers"]["input gradient"] = False
    found = answer(configured(), wrong)
    assert found.sentence.startswith("More than rounding")


def test_a_difference_beyond_the_bound_is_not_called_rounding(values):
    wrong = copy.deepcopy(values)
    row = next(r for r in wrong[0]["literal"]["rows"] if r["dtype"] == "float32" and r["pass"] == PASSES[2])
    row |= {"difference": 10.0, "share": 900.0}
    found = answer(configured(), wrong)
    assert found.sentence.startswith("More than the order of a plain sum")
    assert "more than rounding" in found.tables[0].conclusion


def test_nothing_apart_is_said_so(values):
    equal = copy.deepcopy(values)
    for v in equal.values():
        for row in v["literal"]["rows"]:
            row |= {"difference": 0.0, "share": 0.0, "relative": 0.0, "ulps": 0.0}
        for row in v["sweep"]:
            row |= {"largest": 0.0, "rms": 0.0, "share": 0.0}
    found = answer(configured(), equal)
    assert found.sentence.startswith("Nothing differs")
    for figure in found.figures:
        assert as_files(figure)["png"]


def test_a_dtype_that_the_device_lacks_has_its_line(values):
    lacking = copy.deepcopy(values)
    for v in lacking.values():
        v["literal"]["rows"] = [r for r in v["literal"]["rows"] if r["dtype"] != "float16"]
        v["literal"]["missing"] = {"float16": "no such kernel"}
    table = answer(configured(), lacking).tables[0]
    assert {"dtype": "float16", "pass": "not available here"} in table.rows
    assert "no such kernel" in table.conclusion


def test_a_dtype_whose_range_is_exceeded_is_left_out_and_said():
    found = measure_literal(Case(1, 2, 2, (1, 1), 64, 66), seed=0, device="cpu")
    assert "largest number, 65504" in found["missing"]["float16"]
    assert {r["dtype"] for r in found["rows"]} == set(DTYPES) - {"float16"}


def test_few_seeds_do_not_say_who_is_more_right(values):
    assert "cannot tell" in answer(configured(), {0: values[0]}).sentence


def test_a_side_that_is_nearer_in_every_seed_is_named(values):
    many = {seed: copy.deepcopy(values[0]) for seed in range(12)}
    for v in many.values():
        for row in v["literal"]["rows"]:
            worse = row["dtype"] == "bfloat16" and row["pass"] == "input gradient"
            row |= {"rms_whole": 1.0, "rms_split": 1.5 if worse else 1.0}
    sentence = answer(configured(), many).sentence
    assert "the original is nearer to the exact result in 12 of 12 seeds" in sentence
    assert "but for the bfloat16 input gradient" in sentence


def test_a_dtype_that_is_missing_in_one_seed_is_answered_from_the_others(values):
    lacking = copy.deepcopy(values)
    literal = lacking[1]["literal"]
    literal["rows"] = [r for r in literal["rows"] if r["dtype"] != "float16"]
    literal["missing"] = {"float16": "too large"}
    table = answer(configured(), lacking).tables[0]
    assert "float16 is not available in 1 of 3 seeds: too large" in table.conclusion
    assert [r["differing"][-4:] for r in table.rows if r["dtype"] == "float16"] == ["of 2"] * 3


def test_integers_that_differ_count_though_others_could_not_be_asked(values):
    mixed = copy.deepcopy(values)
    mixed[0]["integers"] = dict.fromkeys(PASSES)
    mixed[2]["integers"]["forward"] = False
    assert answer(configured(), mixed).sentence.startswith("More than rounding")


def test_a_sum_cut_in_three_is_the_sum_of_three_sums_in_the_order_of_autograd():
    # parts of a size that no kernel of a CPU treats otherwise than the whole
    case = Case(in_channels=2, out_channels=384, kernel_size=2, split=(128, 128, 128), batch=1, image_size=3)
    causes = [measure_literal(case, seed, "cpu")["causes"] for seed in range(3)]
    assert all(found["cut"] > 0 for found in causes)
    assert all(found["kernel"] == 0 for found in causes)
