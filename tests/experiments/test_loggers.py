"""What the loggers hold, read back with their own readers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driftlab.records import read_table

WANDB = str(Path(sys.executable).with_name("wandb"))


def records_of(run: Path) -> list[dict]:
    listed = subprocess.run(
        [WANDB, "leet", "inspect", "--json", str(run)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in listed.stdout.splitlines()]


@pytest.mark.service
def test_wandb_holds_a_run_a_seed_with_every_row_on_the_step_axis(train, tmp_path):
    done = train("+experiment=control", "seed=0..1", "logger=wandb")
    assert done.status == 0, done.err
    for seed in (0, 1):
        (home,) = tmp_path.glob(f"control/*/seed={seed}")
        (file,) = home.rglob("*.wandb")
        entries = records_of(file)
        rows = [e["history"]["item"] for e in entries if e["type"] == "history"]
        for row, logged in zip(read_table(home / "curves.csv"), rows, strict=True):
            assert row.items() <= logged.items()
        axes = [e["metric"] for e in entries if e["type"] == "metric" and e["metric"].get("glob_name") == "*"]
        assert axes[-1]["step_metric"] == "step"
        (run,) = [e["run"] for e in entries if e["type"] == "run"]
        assert run["run_group"] == f"control-{home.parent.name}"
        assert run["config"]["update"]["seed"] == seed
        assert str(tmp_path) not in json.dumps(run["config"])


def test_tensorboard_holds_the_same_names(judged, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    judged("+experiment=control", "logger=tensorboard")
    (home,) = tmp_path.glob("control/*/seed=0")
    events = EventAccumulator(str(home / "tensorboard"))
    events.Reload()
    rows = read_table(home / "curves.csv")
    logged = {e.step: e.value for e in events.Scalars("weight_distance/control.float32")}
    assert logged == pytest.approx({int(r["step"]): r["weight_distance/control.float32"] for r in rows})


def test_csv_holds_the_same_names(judged, tmp_path):
    judged("+experiment=control", "logger=csv")
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "weight_distance/control.float32" in metrics.read_text().splitlines()[0]
