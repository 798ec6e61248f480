"""``+experiment=batch_size``: its parts against second implementations, its answer on small settings."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas
from omegaconf import OmegaConf
from torch import nn

from driftlab.diagnosis import diagnosed
from driftlab.report.sections import Look
from driftlab.verdict.rules import judge
from experiments.batch_size.answer import answer
from experiments.batch_size.arithmetic import computing, in_arithmetic, rounded_to_tf32
from experiments.batch_size.layers import kernels, layer_by_layer
from experiments.batch_size.measure import about, measure
from experiments.batch_size.network import AllDepths, boards, prepared
from experiments.batch_size.plan import read
from experiments.batch_size.seeds import in_ranges, size_ranges, ulp
from experiments.batch_size.suite import (
    InLargerBatch,
    LessBatchMean,
    batch_of,
    neighbours,
    settled,
    subject_of,
)
from experiments.batch_size.sweep import sweep
from models.policy_net import PolicyNet
from models.rewrites.row_by_row import row_by_row
from suite.command.errors import ConfigurationError
from tests.suite.conftest import set_anew

torch.set_num_threads(1)
YAML = Path(__file__).resolve().parent.parent.parent / "conf/experiment/batch_size.yaml"
PUBLISHED = YAML.parents[2] / "results/published/batch_size"
LOOK = Look("#1b1d21", "#e4e7ec", ("#c8500a", "#0a72b8", "#10704a", "#8a5a00", "#6b3fa0", "#22252a"))


def chosen(*overrides, scale="smoke"):
    config = OmegaConf.load(YAML)
    config.merge_with({"scale": {"name": scale}, "device": "cpu", "threads": None, "tf32": False})
    config.merge_with_dotlist(list(overrides))
    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))


SMALL = ("case.blocks=2", "case.filters=16", "sweep.up_to=20", "sweep.above=[33]", "sweep.few=[2,17]")


def small_plan(*overrides):
    return read(chosen(*SMALL, "statistics.rows=16", "statistics.batches=3", *overrides, scale="small"))


@pytest.mark.parametrize("norm", ["batch", "identity"])
def test_all_depths_are_the_networks_built_one_by_one(norm):
    network = {"filters": 6, "planes": 2, "board": (7, 6), "moves": 7}
    torch.manual_seed(3)
    together = AllDepths(4, norm, network)
    batches = [torch.rand(8, 2, 7, 6) for _ in range(3)]
    for x in batches:
        together(x)
    together.eval()
    for depth, logits in enumerate(together(batches[0])):
        torch.manual_seed(3)
        alone = PolicyNet(depth, norm=norm, **network)
        for x in batches:
            alone(x)
        assert torch.equal(alone.eval()(batches[0]), logits)
    assert torch.equal(together.deepest()(batches[0]), logits)
    assert all(torch.equal(t, together.deepest().state_dict()[n]) for n, t in alone.state_dict().items())


def test_the_statistics_are_those_of_random_boards():
    network = prepared(small_plan("statistics.batches=60"), "batch", 0)
    values = network.conv_block.conv(torch.rand(400, 2, 7, 6))
    torch.testing.assert_close(
        network.conv_block.batch.running_mean, values.mean((0, 2, 3)), atol=0.03, rtol=0
    )
    assert not network.training


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99))
def test_rounding_to_tf32_is_to_the_nearest_of_eleven_bits(value):
    exact = float(np.float32(value))
    mantissa, exponent = np.frexp(exact)
    expected = float(np.ldexp(np.round(mantissa * 2**11), exponent - 11))
    if exact == 0 or abs(exact) >= 2.0**-126:  # below, float32 itself has fewer bits
        assert float(rounded_to_tf32(torch.tensor([value], dtype=torch.float32))) == expected


def test_emulated_tf32_is_off_by_its_unit_round_off_and_leaves_the_network_alone():
    network = PolicyNet(0, filters=4).eval()
    x = torch.rand(3, 2, 7, 6)
    twin = in_arithmetic(network, "TF32 (emulated)")
    with computing("TF32 (emulated)"):
        apart = float((twin(x) - network(x)).norm() / network(x).norm())
    assert 2.0**-16 < apart < 2.0**-8
    assert not torch.equal(twin.conv_block.conv.weight, network.conv_block.conv.weight)


@pytest.mark.parametrize("name", ["float32", "TF32"])
def test_tf32_is_set_around_a_run_and_restored(name):
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    with computing(name):
        assert [flag.allow_tf32 for flag in flags] == [name == "TF32"] * 2
    assert [flag.allow_tf32 for flag in flags] == before


def test_the_sweep_is_what_a_loop_over_batch_sizes_finds():
    plan = small_plan()
    network, rows = prepared(plan, "batch", 1), boards(plan, "random", 1)
    with torch.no_grad():
        found = sweep(plan, network, rows, plan.sizes)
        alone = [y[0] for y in network(rows[:1])]
        for i, size in enumerate(plan.sizes):
            logits = [y[0] for y in network(rows[:size])]
            assert found["differences"][i] == float((logits[-1] - alone[-1]).abs().max())
            assert (found["patterns"][i] == 0) == torch.equal(logits[-1], alone[-1])
            if found["first"][i] is None:
                assert found["patterns"][i] == 0
    assert found["depths"][-1]["difference"] == max(found["differences"])
    assert found["depths"][1]["logit"] == float(alone[1].abs().max())
    tried = dict(zip(plan.sizes, found["differences"], strict=True))
    assert found["depths"][-1]["common"] == max(tried[size] for size in plan.few)


def test_without_norms_zero_boards_leave_the_last_bias_alone():
    plan = small_plan()
    network = prepared(plan, "identity", 0)
    with torch.no_grad():
        found = sweep(plan, network, boards(plan, "zeros", 0), plan.sizes)
    assert {d["signal"] for d in found["depths"]} == {0.0}
    assert not any(found["differences"])
    assert set(found["first"]) == {None}


def test_layers_carry_add_and_amplify():
    plan = small_plan()
    network, rows = prepared(plan, "batch", 2).deepest(), boards(plan, "random", 2)[:17]
    layers = {layer["name"]: layer for layer in layer_by_layer(network, rows)}
    with torch.no_grad():
        logits, alone = network(rows)[0].double(), network(rows[:1])[0].double()
    carried = float((logits - alone).norm() / alone.norm())
    assert layers["policy_head.linear"]["carried"] == pytest.approx(carried, rel=1e-12)
    assert layers["conv_block.conv"]["carried"] == layers["conv_block.conv"]["fresh"]
    norm = network.res_blocks[0].batch1
    factors = (norm.weight.abs() / (norm.running_var + norm.eps).sqrt()).detach()
    found = layers["res_blocks.0.batch1"]
    assert found["factor"] == pytest.approx(float(factors.median()))
    if found["absolute_gain"] is not None:
        assert float(factors.min()) * 0.999 <= found["absolute_gain"] <= float(factors.max()) * 1.001
    assert all(
        layer["absolute_gain"] <= 1.0
        for layer in layers.values()
        if layer["kind"] == "ReLU" and layer["gain"]
    )


def test_a_kernel_beyond_rounding_exceeds_the_bound():
    network, rows = PolicyNet(0, filters=4).eval(), torch.rand(9, 2, 7, 6)
    sizes = {"float32": [2, 3, 8, 9], "float64": [2, 8]}
    assert all(k["bound"] is None or k["bound"] <= 1 for k in kernels(network, rows, sizes))
    network.conv_block.conv.register_forward_hook(lambda _, __, y: y * (1 + 1e-3 * (len(y) > 4)))
    found = {(k["layer"], k["arithmetic"]): k for k in kernels(network, rows, sizes)}
    assert found["conv_block.conv", "float64"]["patterns"] == [0, 1]
    assert found["conv_block.conv", "float64"]["bound"] > 1
    assert found["conv_block.conv", "float32"]["bound"] > 1
    assert found["policy_head.conv", "float32"]["bound"] <= 1  # fed the same, it is right


def test_neighbours_tell_a_leak_from_rounding():
    plan = small_plan("layers.batch=9")
    network, rows = prepared(plan, "batch", 0).deepest(), boards(plan, "random", 0)
    assert neighbours(plan, network, rows) == 0
    assert neighbours(plan, LessBatchMean(network), rows) > 1e-4
    network.train()
    before = network.conv_block.batch.running_mean.clone()
    assert neighbours(plan, network, rows) > 1e-4
    assert torch.equal(network.conv_block.batch.running_mean, before)


def test_in_a_larger_batch_the_rows_are_the_same():
    x = torch.rand(3, 4)
    assert torch.equal(InLargerBatch(nn.Identity().eval(), 5)(x), x)
    assert len(InLargerBatch(nn.Identity().eval(), 5).module(x)) == 3


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
@settings(deadline=None)
def test_ranges_cover_all_sizes_once(marks):
    sizes = list(range(2, 2 + len(marks)))
    ranges = size_ranges(sizes, marks)
    assert [i for _, positions in ranges for i in positions] == list(range(len(sizes)))
    assert all(len({marks[i] for i in positions}) == 1 for _, positions in ranges)


def test_ranges_in_words():
    assert in_ranges([2, 3, 4, 8, 9, 64], lambda n: n not in (4, 9)) == "2 to 3, 8, 64"


@pytest.mark.parametrize("value", [0.53, 1.0, 3.7])
def test_ulps_are_those_of_the_dtype(value):
    assert ulp(value, "float32") == np.spacing(np.float32(value))
    assert ulp(value, "float64") == np.spacing(value)


@pytest.fixture(scope="module")
def measured():
    return {seed: measure(chosen("suite.rows=3"), seed) for seed in (0, 1)}


def test_the_suite_tells_rounding_from_leaks(measured):
    for one in measured.values():
        assert judge([one.record]).verdict in ("round_off", "bit_identical")
        said = {v["compared"].split(":")[0]: v for v in one.values["verdicts"]}
        assert said["eval mode"]["neighbours"] == 0
        leaks = [v for name, v in said.items() if name != "eval mode"]
        assert [v["verdict"] for v in leaks] == ["bug", "bug"]
        assert all(v["neighbours"] > 0 for v in leaks)


def test_the_record_has_the_curves_of_a_run(measured):
    record = measured[0].record
    assert {"reference.float32", "candidate.float32", "control.float64"} <= set(record.arms)
    assert [row["step"] for row in record.curves] == [0, 1, 2]


def test_answers_from_what_was_stored(measured):
    values = {seed: json.loads(json.dumps(one.values)) for seed, one in measured.items()}
    found = answer(chosen("suite.rows=3"), values)
    names = [t.name for t in found.tables]
    assert names == [
        *("differences", "batch_sizes", "depths", "first_layers", "kernels", "kinds"),
        *("verdicts", "costs", "places"),
    ]
    assert all(t.conclusion and t.rows and set(r) == set(t.columns) for t in found.tables for r in t.rows)
    rows = {(r["norm"], r["arithmetic"], r["inputs"]): r for r in found.tables[0].rows}
    deepest = max(s["depths"][-1]["difference"] for v in values.values() for s in v["sweeps"][:1])
    assert rows["BatchNorm", "float32", "zeros"]["deep"] == deepest
    assert "expected" not in found.tables[0].columns  # predictions are of another network
    assert "no leak" in found.sentence or "no batch size changes a bit" in found.sentence
    for figure in found.figures:
        figure.draw(Canvas(figsize=(480 / 72, 330 / 72)), LOOK)


def test_the_costs_in_the_sentences_are_those_of_the_table(measured):
    """Seeds of unequal speed: the median of their ratios is not the ratio of their medians."""
    values = {seed: json.loads(json.dumps(measured[0].values)) for seed in range(3)}
    for speed, one in zip((1.0, 10.0, 2.0), values.values(), strict=True):
        for c in one["costs"]:
            c["milliseconds"] = speed if c["chunk"] is None else speed * (5 - speed / 3) * c["chunk"]
    config = chosen("suite.rows=3")
    found = answer(config, values)
    costs = next(t for t in found.tables if t.name == "costs")
    (row,) = costs.rows
    assert f"{row[f'chunk {config.chunk}']:.3g} times for {row['batch']} row" in found.sentence
    cheapest = min(v for k, v in row.items() if k.startswith("chunk"))
    assert f"for {row['batch']} row ({cheapest:.3g} times plain)" in costs.conclusion


def test_the_published_costs_are_those_of_the_published_table():
    page = (PUBLISHED / "README.md").read_text()
    found = {int(r["batch size"]): r for r in csv.DictReader((PUBLISHED / "tables/costs.csv").open())}
    said = re.findall(r"([\d.]+) times for (\d+) rows?", page)
    said += re.findall(r"for (\d+) rows? \(([\d.]+) times plain\)", page)
    assert len(said) == 5
    for ratio, batch in said[:2]:
        assert f"{float(found[int(batch)]['chunks of 8 (times plain)']):.3g}" == ratio
    for batch, ratio in said[2:]:
        least = min(float(v) for k, v in found[int(batch)].items() if k.startswith("chunks of"))
        assert f"{least:.3g}" == ratio


@pytest.mark.parametrize(("coarse", "said"), [(1e-4, True), (2e-7, False)])
def test_a_growth_of_tf32_beyond_that_of_float32_is_explained(measured, coarse, said):
    values = json.loads(json.dumps(measured[0].values))
    for s in values["sweeps"]:
        for depth, common in ((0, 1e-7), (-1, coarse if s["arithmetic"].startswith("TF32") else 2e-7)):
            s["depths"][depth]["common"] = common
    conclusion = answer(chosen("suite.rows=3"), {0: values}).tables[2].conclusion
    assert ("rounds its inputs to 11 bits" in conclusion) == said
    assert ("(1,000 times)" in conclusion) == said


def test_in_chunks_nothing_differs_in_any_bit():
    one = measure(chosen("batch_invariant=true", "chunk=3"), 0)
    assert judge([one.record]).verdict == "bit_identical"
    assert not any(d for s in one.values["sweeps"] for d in s["differences"])
    assert not any(depth["difference"] for s in one.values["sweeps"] for depth in s["depths"])
    assert {p for s in one.values["sweeps"] for p in s["patterns"]} == {0}
    found = answer(chosen("batch_invariant=true", "chunk=3"), {0: one.values})
    assert "the same bits in every batch size" in found.sentence
    for figure in found.figures:
        figure.draw(Canvas(figsize=(480 / 72, 330 / 72)), LOOK)


def test_other_sizes_than_those_asked_about():
    config = chosen("case.board=[3,5]", "case.moves=4", "case.planes=3", "case.blocks=0", "layers.batch=5")
    one = measure(config, 5)
    found = answer(config, {5: json.loads(json.dumps(one.values))})
    assert len(next(t for t in found.tables if t.name == "depths").rows) == 1
    assert "no residual blocks" in about(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("case.blocks=-1", "case.blocks=-1 must be a whole number of at least 0"),
        ("case.filters=0", "case.filters=0 must be a whole number of at least 1"),
        ("case.board=[7]", r"case.board=\[7\] must be height and width"),
        ("case.board=[1,1]", r"case.board=\[1, 1\] must be height and width, with 2 fields or more"),
        ("sweep.above=[64,0]", "sweep.above=0 must be a whole number of at least 1"),
        ("case.board=7", "case.board=7 must be a list"),
        ("sweep.few=[1]", r"sweep.few has no size to measure; write sizes such as sweep.few=\[16,64\]"),
        ("cost.chunks=[]", r"cost.chunks=\[\] is empty"),
        ("suite.learning_rate=0", "suite.learning_rate=0 must be a finite number above 0"),
        ("suite.learning_rate=inf", "suite.learning_rate=inf must be a finite number"),
        ("chunk=1.5", "chunk=1.5 must be a whole number"),
        ("layers.batch=1", "layers.batch=1 must be a whole number of at least 2"),
        ("batch_invariant=maybe", "batch_invariant=maybe must be true or false"),
    ],
)
def test_refuses_settings_in_one_line(override, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        read(set_anew("batch_size", override))
    assert "\n" not in str(error.value)


def test_there_are_rows_enough_for_every_batch():
    plan = small_plan("cost.batches=[1,70]", "suite.rows=5")
    assert plan.largest == 70
    assert len(boards(plan, "random", 0)) == len(boards(plan, "zeros", 0)) == 70


def test_a_gpu_has_time_for_all_sizes_in_each_arithmetic():
    plan = read(chosen(scale="full"))
    assert plan.few == plan.sizes == (*range(2, 66), 127, 128, 129, 255, 256, 257, 512, 513)


@pytest.mark.parametrize("scale", ["smoke", "small", "full"])
@pytest.mark.parametrize("sizes", [["sweep.up_to=1", "sweep.above=[]"], ["sweep.few=[100,101]"]])
def test_every_arithmetic_is_tried_at_sizes_of_float32(scale, sizes):
    plan = read(chosen(*sizes, scale=scale))
    assert set(plan.few) <= set(plan.sizes)
    assert list(plan.sizes) == sorted(set(plan.sizes) - {1})


def test_the_first_questions_settle_a_control_as_all_do():
    plan = small_plan("case.filters=4", "suite.rows=2", "suite.steps=1", "layers.batch=4")
    network, rows = prepared(plan, "batch", 0).deepest(), boards(plan, "random", 0)
    subject = subject_of(plan, LessBatchMean(network), row_by_row, rows, 0)
    batch = batch_of(plan, rows, 0)
    first, whole = judge([settled(subject, batch)]), judge([diagnosed(subject, [batch], 1)])
    assert (first.verdict, first.where) == (whole.verdict, whole.where)
    assert settled(subject_of(plan, network, row_by_row, rows, 0), batch) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda v: v["verdicts"][0].update(verdict="bug"), "row by row: bug"),
        (lambda v: v["verdicts"][0].update(neighbours=0.25), "move the first row's logits by 0.25"),
        (lambda v: [c.update(same=False) for c in v["costs"]], "should give, and does not, a row"),
        (lambda v: [p.update(answers=2) for p in v["places"]], "in the same place of its chunk"),
        (
            lambda v: [d.update(difference=0.0) for s in v["sweeps"] for d in s["depths"]],
            "No batch size that",
        ),
        (lambda v: [x.update(fresh=1e-9) for x in v["layers"]["random"]], "no leak between rows: another"),
    ],
)
def test_the_sentence_follows_what_was_measured(measured, change, sentence):
    values = json.loads(json.dumps(measured[0].values))
    change(values)
    assert sentence in answer(chosen("suite.rows=3"), {0: values}).sentence
