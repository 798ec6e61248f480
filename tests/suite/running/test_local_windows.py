"""Local windows along a seed's training: they leave it as it was, and find what sets in late."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.record.local_windows import growth, windows_of
from driftlab.record.seed_record import RecordError, read_local, read_seed
from suite.command.errors import ConfigurationError
from suite.running.costs import Cost, Sketch
from suite.running.local_choice import CLOSEST, WINDOWS, local_choice, spread
from tests.suite.programs import ONE_BLOCK
from tests.suite.running.test_float64_steps import QUIET, configured, open_experiment

SMALL = [ONE_BLOCK, "probe_images=2", "batch_size=4", "eval_images=4"]
TRAINING = [*SMALL, "float64_steps=2", "workers=1", "threads=1"]


@given(st.integers(1, 100_000), st.integers(0, 60), st.integers(1, 20))
def test_they_are_spread_evenly_and_none_overlaps(steps, most, updates):
    begins = spread(steps, most, updates)
    assert len(begins) <= most
    assert all(updates < begin <= steps - updates for begin in begins)
    for before, after in pairwise(begins):
        assert after >= max(before * CLOSEST, before + updates + 1)
    if begins:
        assert begins[-1] == steps - updates  # so late that it ends with the training
    elif most:
        assert steps - updates <= updates


def test_they_take_their_share_of_the_training():
    settings = configured("scale=full", "float64_steps=100", "log_schedule.dense=1")
    costs = {"float32": Cost(0.01, 0.0, 0.0), "float64": Cost(0.04, 0.0, 0.0)}
    sketch = Sketch((), 1, "a GPU", costs)
    training = 3901 * 0.01 + 101 * 0.04
    one = 7 * 5 / 3 * 0.05  # five arms where the run has three
    assert len(local_choice(settings, sketch)["local_windows"]) == int(0.1 * training / one) == 7
    settings.local.share = 0.01
    none = local_choice(settings, sketch)
    assert none["local_windows"] == []
    assert "local.share=0.01 pays none" in none["why"]


def test_who_comes_first_chooses_for_all(tmp_path):
    settings = configured("scale=small", f"results={tmp_path}")
    first = WINDOWS.settle(open_experiment(settings, None, QUIET), {"local_windows": [9, 60], "why": "so"})
    second = WINDOWS.settle(open_experiment(settings, None, QUIET), {"local_windows": [70], "why": "or so"})
    later = open_experiment(settings, None, QUIET)
    for experiment in (first, second, later):
        assert experiment.settings.local.windows == [9, 60]
        assert experiment.digest == first.digest


def test_asked_for_they_are_another_experiment():
    from suite.command.configuration import digest

    assert digest(configured()) == "d99c7adf7c"  # as before there were any
    others = ("local.windows=[60]", "local.windows=[61]", "local.share=0.5", "local.updates=5")
    assert len({digest(configured(*o)) for o in ([], *([o] for o in others))}) == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["local.windows=[60,62]"], "must rise by more than local.updates=6"),
        (["local.windows=[120]"], "the last of 120 steps is 119"),
        (["local.windows=often"], "local.windows"),
        (["local.share=0"], "must be a number above 0 and below 1"),
    ],
)
def test_what_means_nothing_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        configured("scale=small", *given)


def tables(home, *names):
    return [(home / name).read_bytes() for name in names]


def test_a_training_is_the_same_with_and_without_them(judged, tmp_path):
    command = ["+experiment=split_conv", *TRAINING, "steps=6"]
    judged(*command, "local.windows=[]", f"results={tmp_path / 'without'}")
    said = judged(*command, "local={windows: [1, 4], updates: 2}", f"results={tmp_path / 'with'}")
    without, home = (next((tmp_path / name).rglob("seed=0")) for name in ("without", "with"))
    names = ("curves.csv", "evaluations.csv")
    assert tables(without, *names) == tables(home, *names)
    assert not (without / "local.csv").exists()
    windows = windows_of(read_local(home / "local.csv"))
    assert {begins: [row["updates"] for row in rows] for begins, rows in windows.items()} == {
        1: [0, 1, 2],
        4: [0, 1, 2],
    }
    for rows in windows.values():  # from equal weights
        assert rows[0]["weight_distance/candidate.float64"] == 0
        assert 0 < rows[0]["weight_distance/control_all.float64"] < 1e-15
    (found,) = (e for e in said["evidence"] if e["probe"] == "local_windows")
    assert found["supports"] == "round_off"
    assert "2 windows, from step 1 to 4" in found["reading"]
    page = next((tmp_path / "with").rglob("report.html")).read_text()
    assert 'id="local-windows"' in page
    assert 'id="local-drift"' in page
    forged = home / "local.csv"
    forged.write_text(forged.read_text().replace("updates", "update"))
    with pytest.raises(RecordError):
        read_seed(home.parent, 0)


@pytest.mark.parametrize(
    ("sort", "pass_"),
    [
        ("counter", "forward"),
        ("accumulator", "forward"),
        ("gradient", "weight gradient"),
        ("schedule", "weight gradient"),
    ],
)
def test_a_fault_that_sets_in_between_two_windows_is_found_at_its_step(judged, sort, pass_):
    late = [f"rewrite.options.sort={sort}", "rewrite.options.at=17"]
    windows = "local={windows: [8, 26], updates: 2}"
    said = judged("+experiment=late_fault", "sizes.smoke.steps=30", *TRAINING, *late, windows)
    assert said["verdict"] == "bug"
    assert said["where"]["step"] == 17
    assert said["where"]["pass"] == pass_
    assert "the window from step 8 stays with its controls" in said["headline"]


def test_a_candidate_of_another_form_has_none_and_says_why(judged):
    rewrite = "rewrite.target=tests.suite.running.rewrites_of_another_form.negative"
    said = judged(
        "+experiment=split_conv", *TRAINING, rewrite, "steps=3", "local.windows=[1]", "local.updates=1"
    )
    (found,) = (e for e in said["evidence"] if e["probe"] == "local_windows")
    assert found["status"] == "not_applicable"
    assert "cannot be put where the reference is" in found["reading"]


def test_growth_is_the_factor_an_update():
    rows = [{"updates": k, "d": 1e-12 * 3.0**k} for k in range(5)]
    assert math.isclose(growth(rows, "d"), 3.0)
    assert growth(rows[:2], "d") is None
    assert growth([{"updates": k, "d": 0.0} for k in range(4)], "d") is None


def test_run_json_says_what_they_cost(judged, tmp_path):
    judged("+experiment=split_conv", *TRAINING, "steps=3", "local={windows: [1], updates: 1}")
    (file,) = tmp_path.rglob("run.json")
    local = json.loads(file.read_text())["local"]
    assert local["windows"] == [1]
    assert local["seconds"] > 0


def test_a_window_that_fails_costs_no_training_and_is_no_good_verdict(judged, monkeypatch):
    monkeypatch.delattr("driftlab.lockstep.local.Window")
    said = judged("+experiment=split_conv", *TRAINING, "steps=3", "local={windows: [1], updates: 1}")
    assert said["verdict"] == "inconclusive"
    (found,) = (e for e in said["evidence"] if e["probe"] == "local_windows")
    assert found["status"] == "failed"
    assert "Window" in said["headline"]
