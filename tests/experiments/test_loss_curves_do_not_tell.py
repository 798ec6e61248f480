import json
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.report.sections import as_files, in_page, shown
from experiments.loss_curves_do_not_tell.answer import answer, judged
from experiments.loss_curves_do_not_tell.measure import about, measure
from experiments.loss_curves_do_not_tell.networks import NETWORKS, subjects
from experiments.loss_curves_do_not_tell.rules import DRIFTLAB, HABITS, score
from experiments.loss_curves_do_not_tell.series import at, by_size, last, loss_off, tail_loss
from suite.command.errors import ConfigurationError
from suite.data import load_images
from suite.running.building import make_batches, own_seeds
from suite.running.networks import build_reference
from tests.suite.conftest import resolved, set_anew

WRONG = [n.role for n in NETWORKS if not n.same]
RIGHT = [n.role for n in NETWORKS if n.same]
RULES = {rule.key: rule for rule in (*HABITS, DRIFTLAB)}


configured = partial(resolved, "loss_curves_do_not_tell")


@pytest.fixture(scope="module")
def config():
    return configured()


@pytest.fixture(scope="module")
def images(config):
    return load_images(config, lambda line: None)


@pytest.fixture(scope="module")
def asked(config, images):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    measured = measure(config, 1, images)
    assert torch.equal(torch.get_rng_state(), state)
    return measured


@pytest.fixture
def seed(asked):
    """As it comes back from the disk, to be altered."""
    return json.loads(json.dumps(asked.values))


def naive(config, images, role, seed):
    """A network and the reference after one update in float32, by hand, and what they gave before it."""
    batches = make_batches(config, images, own_seeds(config, seed))
    reference = build_reference(config, images, seed)
    pair = subjects(config, reference, seed)[role]
    inputs, targets = batches.batch(0)
    found = []
    for module in (pair.reference, pair.candidate):
        outputs = module(inputs)
        F.cross_entropy(outputs, targets).backward()
        with torch.no_grad():
            for parameter in (p for p in module.parameters() if p.grad is not None):
                parameter -= 0.1 * (parameter.grad + 5e-4 * parameter)
        found.append((outputs.detach(), module))
    (mine, reference), (theirs, candidate) = found
    moved = pair.fold(dict(candidate.named_parameters()))
    return mine, theirs, dict(reference.named_parameters()), moved


@pytest.mark.parametrize("role", ["right", "scaled", "eps", "swapped"])
def test_first_outputs_and_first_update_are_those_of_plain_torch(config, images, asked, role):
    mine, theirs, weights, moved = naive(config, images, role, seed=1)
    found = asked.values["output_mean"][role]
    assert (found["reference"], found["mean"]) == (float(mine.mean()), float(theirs.mean()))
    assert found["close"] == torch.isclose(theirs.mean(), mine.mean()).item()
    assert found["same_bits"] == torch.equal(mine, theirs)
    assert asked.values["allclose"][role] == all(torch.allclose(moved[n], w) for n, w in weights.items())


def test_faults_span_orders_of_magnitude_and_most_leave_the_first_outputs_alone(asked):
    sizes = {n.role: at(asked.values, "gradient_distance", n.role, "float64", 0) for n in NETWORKS}
    assert max(sizes[r] for r in RIGHT) < 1e-12
    assert [n.role for n in by_size({1: asked.values})] == [*RIGHT, *sorted(WRONG, key=sizes.get)]
    assert min(sizes[r] for r in WRONG) < 1e-4
    assert max(sizes[r] for r in WRONG) > 0.5
    equal = [r for r in WRONG if asked.values["output_mean"][r]["same_bits"]]
    assert equal == ["scaled", "frozen", "detached"]


def test_losses_are_kept_where_the_rules_need_them(config, asked):
    curve = asked.values["curves"]["reference.float32"]
    assert curve["step"] == list(range(config.steps + 1))
    assert asked.values["curves"]["scaled.float64"]["step"][-1] == config.float64_steps
    assert set(asked.values["test"]) == {"reference", *RIGHT, *WRONG}
    assert asked.values["test"]["reference"]["disagreement"] == 0


def test_every_bug_is_called_one_and_the_right_networks_are_not(asked):
    said = {role: v["verdict"] for role, v in asked.values["verdicts"].items()}
    assert {said[r] for r in WRONG} == {"bug"}
    assert {said[r] for r in RIGHT} <= {"round_off", "bit_identical"}
    assert judged([asked.record]).verdict == said["right"]
    assert judged([asked.record]).headline.startswith("of the right rewrite: the same function")
    assert asked.values["verdicts"]["eps"]["where"]["module"] == "layer4.1.bn1"


def test_the_last_tenth_is_counted_in_steps():
    steps = [0, 1, 2, 5, *range(31, 41)]
    curve = {"step": steps, "loss": [float(s) for s in steps]}
    seed = {"curves": {"reference.float32": curve}, "blown_up_at": {"reference.float32": None}}
    assert tail_loss(seed, "reference") == sum(range(37, 41)) / 4


def test_a_network_that_blew_up_agrees_with_nothing(seed):
    seed["blown_up_at"]["right.float32"] = seed["blown_up_at"]["right.float64"] = 1
    seed["test"].pop("right")
    assert last(seed, "loss", "right", "float32") is None
    for key in ("final_loss", "tail_loss", "accuracy", "double"):
        assert RULES[key].same(seed, "right") is False


@pytest.mark.parametrize(("off", "same"), [(0.0099, True), (-0.0099, True), (0.0101, False)])
def test_losses_agree_within_one_percent(seed, off, same):
    reference = seed["curves"]["reference.float32"]["loss"][-1]
    seed["curves"]["eps.float32"]["loss"][-1] = reference * (1 + off)
    assert loss_off(seed, "eps") == pytest.approx(off)
    assert RULES["final_loss"].same(seed, "eps") is same


@pytest.mark.parametrize(("mine", "same"), [(0.51, True), (0.49, True), (0.512, False)])
def test_accuracies_agree_within_one_point(seed, mine, same):
    seed["test"]["reference"]["accuracy"], seed["test"]["eps"]["accuracy"] = 0.5, mine
    assert RULES["accuracy"].same(seed, "eps") is same


@pytest.mark.parametrize(("mine", "same"), [(1.23456, True), (1.23464, True), (1.23466, False)])
def test_float64_losses_agree_where_four_decimals_are_the_same(seed, mine, same):
    seed["curves"]["reference.float64"]["loss"][-1] = 1.23461
    seed["curves"]["eps.float64"]["loss"][-1] = mine
    assert RULES["double"].same(seed, "eps") is same


def test_scores_count_false_alarms_and_missed_bugs_apart(seed):
    for role, verdict in [("right", "bug"), ("control", "inconclusive"), ("eps", "round_off")]:
        seed["verdicts"][role]["verdict"] = verdict
    found = score({0: seed}, DRIFTLAB)
    assert (found.alarms, found.same, found.missed, found.wrong) == (2, 2, 1, 5)
    assert found.right == 4
    seed["verdicts"]["frozen"]["verdict"] = "unstable"
    assert score({0: seed, 1: seed}, DRIFTLAB).missed == 4


def set_value(seed, kind, dtype, index, numbers):
    for role, number in numbers.items():
        seed["curves"][f"{role}.{dtype}"][kind][index] = number


def near(seed, of_right, of_wrong):
    """Losses that are off by so much (relative), accuracies by a tenth of it."""
    off = dict.fromkeys(RIGHT, of_right) | dict.fromkeys(WRONG, of_wrong) | {"reference": 0.0}
    set_value(seed, "loss", "float32", -1, {role: 2.0 * (1 + o) for role, o in off.items()})
    for role, o in off.items():
        seed["test"][role]["accuracy"] = 0.5 + o / 10


def drifts(seed, dtype, index, of_right, of_wrong):
    """Index 1: after one update; -1: at the end."""
    numbers = dict.fromkeys(RIGHT, of_right) | dict.fromkeys(WRONG, of_wrong)
    set_value(seed, "weight_distance", dtype, index, numbers)


def all_drifts(seed, first32, last32, first64, last64):
    for (dtype, index), pair in zip(
        [("float32", 1), ("float32", -1), ("float64", 1), ("float64", -1)],
        [first32, last32, first64, last64],
        strict=True,
    ):
        drifts(seed, dtype, index, *pair)


APART, ALIKE = (1e-15, 1e-5), (0.1, 0.1)


def test_sentence_where_losses_hide_the_bugs_and_float64_does_not(config, seed):
    near(seed, 0.05, 0.02)
    all_drifts(seed, APART, ALIKE, (1e-17, 1.0), APART)
    found = answer(config, {0: seed, 1: seed})
    assert found.sentence.startswith("No: of 10 wrong networks 10 have a final training loss, and 10 a test")
    told = (
        "Float64 drift does: none hides, neither after one update nor at the end, the nearest being 1e+10 "
        "times as far off as any right one. By float32 drift none of 10 hides after one update and 10 at the"
    )
    assert told in found.sentence
    assert "hides the bugs" in found.figures[0].title


def test_sentence_where_losses_tell_and_float64_drift_does_so_early(config, seed):
    near(seed, 0.001, 0.3)
    all_drifts(seed, APART, APART, APART, (1e-5, 1e-2))
    set_value(seed, "weight_distance", "float64", -1, {"eps": 1e-6})
    found = answer(config, {0: seed})
    assert found.sentence.startswith("They do here: none of 5")
    told = "Early float64 drift does: after one update none hides, the nearest being 1e+10 times as far off"
    assert told in found.sentence
    assert "; at the end 1 of 5 hides. By float32 drift none of 5 hides after one update and none" in (
        found.sentence
    )
    assert "hides the bugs" not in found.figures[0].title


def test_sentence_where_nothing_tells(config, seed):
    near(seed, 0.05, 0.02)
    all_drifts(seed, ALIKE, APART, ALIKE, APART)
    told = (
        "Nor does drift always: by float32 drift 5 of 5 hide after one update and none at the end, by "
        "float64 drift 5 after one update and none at the end."
    )
    assert told in answer(config, {0: seed}).sentence


@pytest.mark.parametrize(
    ("missed", "words"),
    [
        (0, "right about 7 of 7 networks; the best rule of thumb, 'final training loss within 1 %', about 6"),
        (1, "right about 6 of 7 networks, and so is 'final training loss within 1 %'"),
        (2, "right about 5 of 7 networks, fewer than 'final training loss within 1 %': 6"),
    ],
)
def test_sentence_about_the_rules_follows_the_counts(config, seed, missed, words):
    near(seed, 0.0, 0.02)
    set_value(seed, "loss", "float32", -1, {"eps": 2.0})
    set_value(seed, "loss", "float64", -1, dict.fromkeys(["reference", *RIGHT, *WRONG], 1.0))
    seed["allclose"] = dict.fromkeys(seed["allclose"], False)
    for role, verdict in seed["verdicts"].items():
        verdict["verdict"] = "bug" if role in WRONG[missed:] else "round_off"
    found = answer(config, {0: seed})
    assert found.sentence.endswith(f"{words}.")
    table = {row["rule"]: row for row in found.tables[1].rows}
    assert table["driftlab's verdict"]["missed"] == f"{missed} of 5"
    assert table["torch.allclose of all weights after one update"]["alarms"] == "2 of 2"


def drawn(found):
    """Every mark of every panel."""
    from matplotlib.figure import Figure as Canvas

    from driftlab.report.sections import PAPER

    canvas = Canvas()
    found.figures[0].draw(canvas, PAPER)
    return [[line for line in ax.lines if line.get_marker() in "ox"] for ax in canvas.axes]


def test_figure_has_a_mark_for_each_network_and_seed(config, seed):
    near(seed, 0.05, 0.02)
    panels = drawn(answer(config, {0: seed, 1: seed, 2: seed}))
    n = len(NETWORKS)
    counts = [[len(line.get_xdata()) for line in panel] for panel in panels]
    assert counts == [[3] * n, [3] * 2 * n, [3] * 2 * n]  # of drift at the end and after one update
    assert sorted(set(panels[0][-1].get_ydata())) == pytest.approx([2.0])


def test_figure_leaves_out_who_blew_up_and_shows_zeros_at_the_bottom(config, seed):
    seed["blown_up_at"]["eps.float32"] = 2
    drifts(seed, "float64", -1, 0.0, 1e-3)
    found = answer(config, {0: seed})
    panels = drawn(found)
    assert sorted(len(line.get_xdata()) for line in panels[0]) == [0] + [1] * 6
    assert min(line.get_ydata()[0] for line in panels[2]) > 0
    assert "Lowest marks: exactly 0." in found.figures[0].caption
    rows = {row["network"]: row for row in found.tables[0].rows}
    assert rows["a BatchNorm: eps 1e-3 instead of 1e-5"]["loss"] == "blew up"
    healthy = json.loads(json.dumps(seed)) | {"blown_up_at": dict.fromkeys(seed["blown_up_at"])}
    both = {row["network"]: row for row in answer(config, {0: seed, 1: healthy}).tables[0].rows}
    assert both["a BatchNorm: eps 1e-3 instead of 1e-5"]["loss"].endswith("; 1 blew up")
    assert as_files(found.figures[0])["png"]


@pytest.mark.parametrize("count", [1, 2])
def test_tables_and_figure_are_fit_to_be_shown(config, asked, seed, count):
    found = answer(config, dict.fromkeys(range(count), seed))
    for table in found.tables:
        assert all(set(row) == set(table.columns) for row in table.rows)
        assert table.rows
        assert not re.search(r"\bnan\b|None", str(shown(table)))
    assert f"n = {count} seed{'s' * (count > 1)}," in found.tables[0].conclusion
    losses = {row["network"]: row["loss"] for row in found.tables[2].rows}
    assert len(found.tables[2].rows) == count * len(NETWORKS)
    assert losses["eps"] == pytest.approx(100 * loss_off(seed, "eps"))
    assert "right rewrite: split_conv" in str(found.tables[0].rows)
    assert not re.search(r"#[0-9a-fA-F]{6}\b", in_page(found.figures[0]))
    assert not math.isnan(sum(score({0: seed}, r).right for r in RULES.values()))


def test_refuses_what_the_question_is_not_about(config, images):
    with pytest.raises(ConfigurationError, match="compares both dtypes"):
        about(configured("dtypes=[float32]"))
    with pytest.raises(ConfigurationError, match="diagnosis_steps=0"):
        set_anew("loss_curves_do_not_tell", "diagnosis_steps=0")
    with pytest.raises(ConfigurationError, match=r"names no nn\.Conv2d"):
        subjects(config, nn.Sequential(nn.Conv2d(3, 4, 3)), 0)
    assert "5 of them wrong; 6 float32 and 3 float64 steps" in about(config)
