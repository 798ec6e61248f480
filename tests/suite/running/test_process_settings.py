"""A rewrite, or whatever else a run loads, that changes the settings of the whole process."""

import csv
import json

import pytest
import torch

from driftlab.process.flags import settings
from tests.suite.programs import ONE_BLOCK

QUICK = ("+experiment=split_conv", "device=cpu", "workers=1", ONE_BLOCK)
QUICK += ("steps=2", "float64_steps=1", "batch_size=8", "probe_images=4")


def records(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.rglob("run.json"))]


def test_a_rewrite_that_turns_tf32_on_is_said_and_judged_and_does_not_reach_the_next_seed(
    judged, tmp_path, capsys
):
    before = settings()
    verdict = judged(*QUICK, "seed=0..1", "rewrite.target=tests.suite.rewrites.in_tf32")
    assert settings() == before
    said = " ".join(capsys.readouterr().out.split())
    assert "the rewrite changes settings of the whole process, put back: float32.cuda.matmul from" in said
    assert "tf32=true trains every arm on a GPU with it" in said
    assert verdict["verdict"] == "reduced_precision"
    assert "the rewrite changes float32.cuda.matmul from ieee to tf32" in verdict["headline"]
    first, second = records(tmp_path)
    for run in (first, second):
        assert set(run["environment"]["fp32_precision"].values()) == {"ieee"}
        assert not any(run["environment"]["tf32"].values())
        assert any("float32.cuda.matmul from ieee to tf32" in line for line in run["settings_changed"])


def test_settings_made_before_the_run_neither_hold_in_it_nor_stop_it(judged, tmp_path):
    torch.backends.fp32_precision = "tf32"
    try:
        assert judged(*QUICK, "seed=0")["verdict"] == "round_off"
        assert torch.backends.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
    (run,) = records(tmp_path)
    assert set(run["environment"]["fp32_precision"].values()) == {"ieee"}
    assert (run["environment"]["deterministic"], run["settings_changed"]) == (True, [])


def test_float64_arms_have_kernels_of_their_own_which_a_setting_turns_off(judged, tmp_path):
    """What they give differs by rounding alone; float32 and the verdict are what they were."""
    verdicts, losses = [], []
    for fast in ("true", "false"):
        results = tmp_path / fast
        # without scales of 0, through which no convolution gets a gradient at first
        command = ("model.width=8", "+model.zero_scale=false", f"fast_float64={fast}", f"results={results}")
        verdicts.append(judged(*QUICK, *command, "seed=0")["verdict"])
        (run,) = records(results)
        assert run["environment"]["float64_convolutions"] == {"true": "driftlab's", "false": "torch's"}[fast]
        (curves,) = results.rglob("curves.csv")
        losses.append(next(csv.DictReader(curves.open())))
    assert verdicts == ["round_off", "round_off"]
    for role in ("reference", "candidate", "control"):
        assert losses[0][f"loss/{role}.float32"] == losses[1][f"loss/{role}.float32"]
        own, other = (float(row[f"loss/{role}.float64"]) for row in losses)
        assert own == pytest.approx(other, rel=1e-13)
    distances = [row["gradient_distance/reference.float32"] for row in losses]
    assert distances[0] != distances[1]  # from float64: so the setting reached the arms
