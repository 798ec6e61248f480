"""What a trained run leaves with W&B and TensorBoard, and what it must not hold."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from driftlab.record.seed_record import read_table
from tests.suite.conftest import ROOT
from tests.suite.logged import config, events_in, of_type, records_of, rows, summary, text_of

# Small, for the time it takes.
TRAINING = (
    "+experiment=control",
    "model=resnet18",
    "steps=3",
    "float64_steps=2",
    "batch_size=8",
    "eval_images=20",
)
# What belongs to a person and a machine. The home folder is the temporary folder of the test.
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "UNRELATED_TOKEN": "marker-of-the-environment",
    "USER": "somebody-by-name",
    "LOGNAME": "somebody-by-name",
}
HOST = "machine-by-name"

# Python asks for the machine's name by this function; what asks the system itself, leet's records would show.
LAUNCH = f"""
import runpy, socket, sys
socket.gethostname = lambda: {HOST!r}
sys.path.insert(0, {str(ROOT)!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds trained by somebody with secrets, from their home folder; the experiment's folder."""
    home = tmp_path_factory.mktemp("home-by-name")
    settings = [*TRAINING, "seed=0..1", "scale=smoke", "data=shapes", "logger=wandb", "results=runs"]
    command = [sys.executable, "-c", LAUNCH, str(ROOT / "train.py"), *settings]
    environment = os.environ | SECRETS | {"HOME": str(home), "WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr
    (folder,) = home.glob("runs/control/*")
    return folder


@pytest.mark.service
def test_wandb_holds_a_run_a_seed_with_every_row_on_the_step_axis(trained):
    for seed in (0, 1):
        home = trained / f"seed={seed}"
        (file,) = home.rglob("*.wandb")
        entries = records_of(file)
        for row, logged in zip(read_table(home / "curves.csv"), rows(entries), strict=True):
            assert row.items() <= logged.items()
            assert logged["_step"] == row["step"]
        axes = [m for m in of_type(entries, "metric") if m.get("glob_name") == "*"]
        assert axes[-1]["step_metric"] == "step"
        (run,) = of_type(entries, "run")
        assert run["run_id"] == f"{trained.name}-{seed}"
        assert (run["run_group"], run["job_type"]) == (f"control-{trained.name}", "seed")
        known = config(entries)
        assert (known["seed"], known["digest"], known["optimizer"]["lr"]) == (seed, trained.name, 0.1)
        assert known["dataset"]["stand_in"]
        assert known["environment"]["versions"]["torch"]
        assert summary(entries)["outcome/control.float32"] == "finished"


@pytest.mark.service
def test_wandb_holds_the_verdict_over_all_seeds_in_the_same_group(trained):
    (file,) = (trained / "verdict").rglob("*.wandb")
    entries = records_of(file)
    verdict = json.loads((trained / "verdict.json").read_text())
    (run,) = of_type(entries, "run")
    assert run["run_id"] == f"{trained.name}-verdict"
    assert (run["run_group"], run["job_type"]) == (f"control-{trained.name}", "verdict")
    told = summary(entries)
    assert (told["verdict"], told["headline"]) == (verdict["verdict"], verdict["headline"])
    assert (told["seeds"], told["as_expected"]) == (2, True)
    table = json.loads((file.parent / "files" / told["evidence.path"]).read_text())
    assert [row[0] for row in table["data"]] == [e["probe"] for e in verdict["evidence"]]
    assert [row[2] for row in table["data"]] == [e["measured"] for e in verdict["evidence"]]


@pytest.mark.service
def test_wandb_holds_the_report_as_it_lies_in_the_folder(trained):
    (file,) = (trained / "verdict").rglob("*.wandb")
    (artifact,) = of_type(records_of(file), "artifact")
    assert artifact["type"] == "report"
    contents = {entry["path"]: entry for entry in artifact["manifest"]["contents"]}
    for name in ("report.html", "verdict.json"):
        data = (trained / name).read_bytes()
        assert contents[name]["digest"] == base64.b64encode(hashlib.md5(data).digest()).decode()
        kept = trained.parent.parent.parent / contents[name]["local_path"]  # from where training was started
        assert kept.read_bytes() == data


@pytest.mark.service
def test_nothing_of_the_person_and_the_machine_is_in_any_file(trained):
    home = trained.parent.parent.parent
    wanted = {*SECRETS.values(), HOST, str(home), home.name}
    files = [p for p in home.joinpath("runs").rglob("*") if p.is_file()]
    assert any(p.suffix == ".wandb" for p in files)
    found = {
        f"{secret} in {p.relative_to(home)}"
        for p in files
        for secret in wanted
        if secret.encode() in p.read_bytes() or secret in str(p.relative_to(home))
    }
    assert not found
    for file in home.rglob("*.wandb"):
        (run,) = of_type(records_of(file), "run")
        assert not {"host", "sweep_id", "git"} & run.keys()


@pytest.mark.service
def test_tensorboard_holds_every_row_of_a_seed_that_went_on_and_the_verdict(trained, judged, tmp_path):
    stored = tmp_path / "control" / trained.name
    shutil.copytree(trained / "seed=0", stored / "seed=0")
    (stored / "seed=0" / "run.json").unlink()  # as if it had been killed after its last checkpoint
    verdict = judged(*TRAINING, "logger=tensorboard")
    curves = read_table(stored / "seed=0" / "curves.csv")
    events = events_in(stored / "seed=0" / "tensorboard")
    name = "weight_distance/control.float32"
    assert [(e.step, e.value) for e in events.Scalars(name)] == [
        (int(r["step"]), pytest.approx(r[name])) for r in curves
    ]
    assert curves[0].keys() - {"step"} <= {*events.Tags()["scalars"]}
    assert "test_accuracy/control.float32" in events.Tags()["scalars"]
    over_seeds = events_in(stored / "verdict" / "tensorboard")
    assert verdict["headline"] in " ".join(text_of(over_seeds, "verdict").split())
    assert all(e["probe"] in text_of(over_seeds, "evidence") for e in verdict["evidence"])
