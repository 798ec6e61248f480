"""What groups compute, cost and equal: its measurements against second implementations, and its answer."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas
from omegaconf import OmegaConf
from torch import nn

from driftlab import assert_equivalent
from driftlab.report.sections import Look
from driftlab.verdict.rules import judge
from experiments.group_semantics.answer import answer
from experiments.group_semantics.cost import costs
from experiments.group_semantics.dense import dense_weight, diagonal_blocks, without_groups
from experiments.group_semantics.equal import compare, integers_agree, side_by_side
from experiments.group_semantics.measure import about, measure
from experiments.group_semantics.reach import blocks, linearised, reach, used_inputs
from experiments.group_semantics.verdicts import literal_record, verdicts
from models.grouped_net import GroupedNet
from models.rewrites.interleave_groups import interleave_groups
from suite.command.errors import ConfigurationError
from tests.suite.conftest import set_anew

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "experiment" / "group_semantics.yaml"
THIN = {"tile": (53, 35), "channels": (8, 8, 8, 8, 8), "features": (8, 8)}
LOOK = Look("#000000", "#888888", ("#c8500a", "#0a72b8", "#10704a", "#8a5a00", "#6b3fa0", "#22252a"))


def configured(*overrides: str):
    shared = {"device": "cpu", "threads": None, "tf32": False, "scale": {"name": "smoke"}}
    return OmegaConf.merge(OmegaConf.load(CONF), shared, OmegaConf.from_dotlist(list(overrides)))


@pytest.fixture(scope="module")
def measured():
    return {seed: measure(configured("sweep.cases=5"), seed) for seed in (0, 1)}


@pytest.fixture(scope="module")
def values(measured):
    return {seed: json.loads(json.dumps(found.values)) for seed, found in measured.items()}


def test_the_config_is_short_and_opens_with_its_hypothesis():
    lines = CONF.read_text().splitlines()
    assert len(lines) <= 25
    assert lines[0] == "# @package _global_"
    assert "Expected: round_off" in " ".join(line for line in lines if line.startswith("#"))


def test_the_pair_in_question_is_round_off(measured):
    judgement = judge([found.record for found in measured.values()])
    assert judgement.verdict == "round_off"
    assert all(len(found.record.curves) == 10 for found in measured.values())


def test_a_seed_measures_the_same_again(values):
    again = measure(configured("sweep.cases=5"), 1)
    assert json.loads(json.dumps(again.values)) == values[1]


def test_the_literal_conv_differs_as_the_thread_says(values):
    for found in values.values():
        forward = {f["dtype"]: f["absolute"] for f in found["literal"]["passes"] if f["pass"] == "forward"}
        assert forward["float32"] == 0 or 1e-7 < forward["float32"] < 5e-7
        assert forward["float64"] < 1e-15
        assert set(found["literal"]["integers"].values()) == {True}
        assert all(f["share"] <= 1 for f in found["literal"]["passes"])


def test_differences_against_the_threads_own_lines():
    torch.manual_seed(3)
    conv, x = nn.Conv2d(6, 6, 3, 1, 1, groups=2, bias=False), torch.randn(1, 6, 24, 24)
    first = F.conv2d(x[:, :3], conv.weight[:3], padding=1)
    second = F.conv2d(x[:, 3:], conv.weight[3:], padding=1)
    by_hand = (conv(x) - torch.cat((first, second), 1)).detach().double()
    found = next(f for f in compare(side_by_side(conv, x.clone()), "float32") if f["pass"] == "forward")
    assert found["absolute"] == by_hand.abs().max()
    assert found["equal"] == (by_hand == 0).sum()
    sums = F.conv2d(x.double().abs(), conv.weight.detach().double().abs(), padding=1, groups=2)
    assert found["u"] == pytest.approx(float((by_hand.abs() / sums).max()) * 2**24, rel=1e-5)
    terms = F.conv2d(torch.ones_like(x), torch.ones_like(conv.weight), padding=1, groups=2)
    gamma = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    assert found["share"] == pytest.approx(float((by_hand.abs() / (2 * gamma * sums)).max()), rel=1e-5)


def test_a_wrong_slice_shows_in_the_integers_and_exceeds_the_bound():
    conv = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
    pair = side_by_side(conv, torch.randn(1, 4, 6, 6))
    pair.separate.windows = pair.separate.windows[::-1]  # each half reads the other's channels
    assert integers_agree(pair, 0)["forward"] is False
    assert max(found["share"] for found in compare(pair, "float64")) > 1


def test_the_sweep_is_within_the_bound_and_exact_in_integers(values):
    cases = [case for found in values.values() for case in found["sweep"]]
    assert len(cases) == 10
    assert all(set(case["integers"].values()) == {True} for case in cases)
    assert all(f["share"] <= 1 for case in cases for f in case["passes"])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_gradients_find_the_blocks_of_the_weight(groups, inputs, outputs, interleaved):
    torch.manual_seed(0)
    conv = nn.Conv2d(groups * inputs, groups * outputs, 3, padding=1, groups=groups)
    layer = interleave_groups(conv) if interleaved and groups > 1 else conv
    x = torch.randn(1, groups * inputs, 5, 4, requires_grad=True)
    expected = blocks(groups * outputs, groups * inputs, groups, interleaved)
    assert torch.equal(reach(layer(x), x), expected)
    if not interleaved:
        assert torch.equal(dense_weight(conv.weight, groups).abs().sum((2, 3)) > 0, expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_groups_are_a_dense_conv_with_zeros(groups, inputs, outputs):
    conv = nn.Conv2d(groups * inputs, groups * outputs, (3, 2), groups=groups).double()
    dense = dense_weight(conv.weight, groups)
    x = torch.randn(2, groups * inputs, 5, 4, dtype=torch.float64)
    assert torch.allclose(conv(x), F.conv2d(x, dense, conv.bias))
    assert torch.equal(diagonal_blocks(dense, groups), conv.weight)


@pytest.mark.parametrize("masked", [False, True])
def test_a_network_without_groups_is_the_same_function_at_the_start(masked):
    net = GroupedNet(**THIN)
    assert_equivalent(net, lambda model: without_groups(model, masked), torch.randn(2, 4, 3, 53, 35))


def test_used_inputs_against_one_at_a_time():
    torch.manual_seed(1)
    net, puzzle = linearised(GroupedNet(**THIN)).double(), torch.randn(1, 4, 3, 54, 35).double()
    used = used_inputs(net, puzzle)["conv1_s1"]["entries"]
    changed = 0
    for row in range(54):
        other = puzzle.clone()
        other[..., row, :] += 1
        changed += not torch.equal(net(other), net(puzzle))
    assert changed == 53  # the last row of a tile of 54 lies beyond the last stride
    assert used == pytest.approx(53 / 54)


def test_costs_are_the_closed_form():
    with torch.device("meta"):
        grouped, plain = GroupedNet(), GroupedNet(groups=1)
    found, full = (costs(net, (1, 4, 3, 213, 67)) for net in (grouped, plain))
    positions = dict(zip(grouped.conv, (95 * 31, 47 * 15, 23 * 7, 23 * 7, 23 * 7), strict=True))
    for name, conv in grouped.conv.items():
        each = conv.weight[0].numel()
        assert found[f"conv.{name}"]["macs"] == 4 * positions[name] * conv.out_channels * each
        assert found[f"conv.{name}"]["parameters"] == conv.out_channels * (each + 1)
        assert full[f"conv.{name}"]["macs"] == conv.groups * found[f"conv.{name}"]["macs"]
    assert found["fc6.fc6_s1"]["macs"] == 4 * 512 * 6336
    assert found["fc7.fc7"]["macs"] == 256 * 2048
    assert sum(layer["parameters"] for layer in found.values()) == 4_868_056


def test_the_suite_says_what_is_the_same_and_what_is_not(values):
    said = {row["rewrite"]: (row["verdict"], row["same_at_start"]) for row in values[0]["verdicts"]}
    assert said == {
        "convs side by side": ("round_off", True),
        "groups=1 with weights of its own": ("bug", False),
        "groups=1 with the same numbers, zeros elsewhere": ("bug", True),
        "groups=1 with the same numbers, zeros elsewhere and kept at zero": ("round_off", True),
        "interleaved channels": ("bug", False),
    }


def test_the_faults_are_placed_in_the_first_grouped_layer():
    torch.manual_seed(0)
    rows = [r for r in verdicts(configured("scale.name=small"), 0) if r["subject"].startswith("network")]
    assert len(rows) == 5
    places = {row["rewrite"]: row["place"] for row in rows if row["verdict"] == "bug"}
    assert len(places) == 3
    assert all(place.startswith("the forward of conv.conv2_s1") for place in places.values())


def test_the_whole_network_can_be_the_pair():
    sizes = ("net.tile=[53,35]", "net.channels=[4,4,4,4,4]", "net.features=[4,4]", "training.updates=2")
    torch.manual_seed(0)
    record = literal_record(configured("training.pair=net", *sizes), 0)
    assert judge([record]).verdict in ("round_off", "bit_identical")
    assert len(record.curves) == 3


def test_the_answer_says_the_numbers(values):
    said = answer(configured(), values)
    assert "Nothing is dropped" in said.sentence
    assert "50 % of the input channels" in said.sentence
    tables = {table.name: table for table in said.tables}
    assert {
        "side_by_side",
        "errors",
        "sweep",
        "layers",
        "through",
        "used",
        "network",
        "cost",
        "verdicts",
    } == set(tables)
    assert "All shapes and the 4,868,056 parameters are the thread's" in tables["network"].conclusion
    shares = {(row["kind"], row["share"]) for row in tables["layers"].rows}
    assert shares == {("groups=1", 1.0), ("grouped", 0.5), ("interleaved", 0.5)}
    for table in said.tables:
        assert all(any(key in row for row in table.rows) for key in table.columns)


def test_the_answer_does_not_claim_what_was_not_measured(values):
    worse = json.loads(json.dumps(values))
    for found in worse.values():
        found["literal"]["integers"]["forward"] = False
        found["sweep"][0]["integers"]["forward"] = False
        for kinds in found["layers"].values():
            kinds["grouped"] |= {"entries": 0.5, "unexpected": 1}
        for row in found["verdicts"]:
            row["verdict"] = "inconclusive"
    said = answer(configured(), worse)
    texts = {table.name: table.conclusion for table in said.tables}
    assert "Nothing is dropped" not in said.sentence
    assert texts["side_by_side"].startswith("More than rounding")
    assert "do not agree" in texts["sweep"]
    assert "are not as the definition" in texts["layers"]
    assert "round_off" not in texts["verdicts"]


def test_the_figures_draw_what_was_counted(values):
    for figure in answer(configured(), values).figures:
        canvas = Canvas(figsize=(480 / 72, 480 * figure.aspect / 72))
        figure.draw(canvas, LOOK)
        assert canvas.axes
    canvas = Canvas()
    answer(configured(), values).figures[0].draw(canvas, LOOK)
    areas = [sum(p.get_width() * p.get_height() for p in axes.patches) for axes in canvas.axes]
    assert areas == pytest.approx([36, 18, 18])


def test_other_sizes_are_answered_without_the_threads_expectations():
    chosen = (
        "case.in_channels=8",
        "case.out_channels=12",
        "case.groups=4",
        "net.channels=[8,8,16,8,8]",
        "net.groups=4",
    )
    config = configured(*chosen, "sweep.cases=2")
    said = answer(config, {7: json.loads(json.dumps(measure(config, 7).values))})
    tables = {table.name: table for table in said.tables}
    assert "25 % of the input channels" in said.sentence
    assert "not the thread's" in tables["network"].conclusion
    assert not any(row["expected"] for row in tables["side_by_side"].rows)
    assert "groups=4" in about(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("case.groups=4", "case.groups=4 does not divide case.in_channels=6"),
        ("case.groups=1", "case.groups=1 must be a whole number of at least 2"),
        ("case.groups=two", "case.groups=two must be a whole number"),
        ("+case.stride=2", "case.stride is no setting"),
        ("case.in_channels=-6", "case.in_channels=-6 must be a whole number"),
        ("case.image=24", "case.image=24 must be a list"),
        ("case.kernel_size=40", "larger than the padded case.image"),
        ("net.groups=5", "net: groups=5 does not divide"),
        ("net.tile=213", "net.tile=213 must be a list"),
        ("net.tile=[213]", "must be two, five and two numbers"),
        ("thin.channels=[a,8,8,8,8]", "thin.channels=a must be a whole number"),
        ("net.tile=[20,20]", "nothing is left of tile"),
        ("sweep.cases=0", "sweep.cases=0 must be a whole number"),
        ("sweep.groups=[1]", "sweep.groups=1 must be a whole number of at least 2"),
        ("sweep.groups=2", "write sweep.groups=[2]"),
        ("training.pair=both", "choose from conv, net"),
        ("training.updates=0", "training.updates=0 must be a whole number"),
        ("training.lr=0", "must be a finite number above 0"),
        ("training.lr=fast", "must be a finite number above 0"),
    ],
)
def test_refuses_in_one_line(override, message):
    with pytest.raises(ConfigurationError, match=message.replace("[", r"\[")) as error:
        measure(set_anew("group_semantics", override), 0)
    assert "\n" not in str(error.value)


def test_integers_that_could_not_be_asked_decide_nothing(values):
    unasked = json.loads(json.dumps(values))
    for found in unasked.values():
        found["literal"]["integers"] = None
        for case in found["sweep"]:
            case["integers"] = None
    texts = {table.name: table.conclusion for table in answer(configured(), unasked).tables}
    assert "they decide nothing" in texts["side_by_side"]
    assert "they decide nothing" in texts["sweep"]
