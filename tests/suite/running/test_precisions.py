"""Arms in 16 bits by the command line: what is trained, asked, written, said and refused."""

import csv
from pathlib import Path

import pytest

from driftlab.precision import TRAINED_IN
from suite.command.configuration import steps_in
from suite.running.costs import Cost, Sketch, float64_choice, forecast
from suite.running.local_choice import local_choice
from tests.suite.programs import ONE_BLOCK
from tests.suite.refusing import assert_refused
from tests.suite.running.test_float64_steps import configured

SMALL = [ONE_BLOCK, "probe_images=2", "batch_size=4", "eval_images=4"]
TRAINING = [*SMALL, "float64_steps=2", "steps=4", "workers=1", "threads=1", "local.windows=[]"]


def rows_of(folder, file="curves.csv"):
    (table,) = folder.rglob(file)
    return list(csv.DictReader(table.open()))


def evidence(said, probe):
    (found,) = (e for e in said["evidence"] if e["probe"] == probe)
    return found


def test_every_role_is_trained_and_judged_in_them(judged, tmp_path):
    said = judged("+experiment=split_conv", *TRAINING, "dtypes=[float32,float64,bf16-mixed,bf16-true]")
    assert said["verdict"] == "round_off"
    for precision in ("bf16-mixed", "bf16-true"):
        assert evidence(said, f"{precision}_pair")["supports"] == "round_off"
        assert evidence(said, f"{precision}_from_float32")["measured"] > 2**-12
        for row in rows_of(tmp_path):
            for role in ("reference", "candidate", "control"):
                assert float(row[f"loss/{role}.{precision}"]) > 0
    assert "bf16-mixed path" in evidence(said, "function")["reading"]
    assert not [c for c in rows_of(tmp_path)[0] if c.startswith("skipped_updates")]


def test_where_weights_are_bfloat16_the_probes_ask_of_that(judged, tmp_path):
    more = ["dtypes=[float32,float64,bf16-true]", "local={windows: [1], updates: 2}"]
    said = judged("+experiment=split_conv", *TRAINING[:-1], *more)
    assert said["verdict"] == "round_off"
    assert "bf16-true path" in evidence(said, "function")["reading"]
    assert evidence(said, "last_step")["measured"] < 2**14
    assert all(float(row["loss/candidate.bf16-true"]) > 0 for row in rows_of(tmp_path, "local.csv"))


def test_a_local_window_follows_the_mixed_precision_too(judged, tmp_path):
    more = ["dtypes=[float32,float64,bf16-mixed]", "local={windows: [1], updates: 2}"]
    said = judged("+experiment=split_conv", *TRAINING[:-1], *more)
    assert evidence(said, "local_windows")["supports"] == "round_off"
    assert all(float(row["loss/candidate.bf16-mixed"]) > 0 for row in rows_of(tmp_path, "local.csv"))


def test_a_norm_left_in_half_is_reduced_precision_with_its_place(judged):
    said = judged("+experiment=norm_in_half", *TRAINING)
    assert said["verdict"] == "reduced_precision"
    assert "fewer bits than the reference keeps" in said["headline"]
    assert said["where"]["module"]


def test_a_fault_that_only_a_scaled_loss_shows_is_a_bug(judged, tmp_path):
    said = judged("+experiment=scaled_loss", *TRAINING)
    assert said["verdict"] == "bug"
    assert evidence(said, "scaled_loss")["supports"] == "bug"
    assert "skipped_updates/candidate.16-mixed" in rows_of(tmp_path)[0]
    assert evidence(said, "float64_pair")["measured"] == 0
    assert evidence(said, "drift")["measured"] == 0


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ("bf16-mixed", "bf16-mixed is compared with float32, write dtypes=[float32,bf16-mixed]"),
        ("float64,16-mixed", "write dtypes=[float32,float64,16-mixed]"),
        ("float32,16-true", f"choose from {', '.join(TRAINED_IN)}"),
    ],
)
def test_what_cannot_be_trained_is_refused(train, tmp_path, dtypes, text):
    assert_refused(train("+experiment=split_conv", f"dtypes=[{dtypes}]"), text)
    assert not list(Path(tmp_path).rglob("*.yaml"))


def test_their_time_counts_in_every_forecast():
    settings = configured("scale=small", "dtypes=[float32,float64,bf16-mixed]", "float64_steps=5")
    assert [steps_in(settings, d) for d in settings.dtypes] == [settings.steps, 5, settings.steps]
    costs = {d: Cost(1.0 if d == "float64" else 0.1, 0.0, 0.0) for d in settings.dtypes}
    mixed = Sketch((), 1, "cpu", costs)
    plain = Sketch((), 1, "cpu", {d: c for d, c in costs.items() if d != "bf16-mixed"})
    extra = forecast(settings, mixed, [0], 1) - forecast(settings, plain, [0], 1)
    assert extra == pytest.approx(0.1 * (settings.steps + 1))
    whole = configured("scale=full")
    assert float64_choice(whole, mixed)["float64_steps"] > float64_choice(whole, plain)["float64_steps"]
    assert local_choice(settings, mixed)["why"] != local_choice(settings, plain)["why"]
