"""Training with W&B online, beside a server that takes everything, or is slow, refuses, or goes away."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftlab.record.seed_record import read_table
from tests.suite.conftest import ROOT
from tests.suite.programs import ONE_BLOCK
from tests.suite.wandb.answers import ENTITY
from tests.suite.wandb.server import Server

pytestmark = pytest.mark.slow

SHORT = (
    "scale=smoke data=shapes steps=3 float64_steps=2 batch_size=4 eval_images=8 probe_images=2 "
    f"{ONE_BLOCK} local.windows=[] seed=0"
)
BUG = "+experiment=planted_bug"


def command(results: Path, *settings: str) -> list[str]:
    given = {setting.partition("=")[0] for setting in settings}
    short = [setting for setting in SHORT.split() if setting.partition("=")[0] not in given]
    return [sys.executable, str(ROOT / "train.py"), *settings, *short, f"results={results}"]


def train(server: Server | None, results: Path, *settings: str, **more: str) -> subprocess.CompletedProcess:
    known = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    own = known | (server.environment if server else {}) | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        command(results, *settings), capture_output=True, text=True, env=own, cwd=ROOT, timeout=400
    )


def synced(server: Server, *arguments: str | Path) -> int:
    """The exit status of W&B's own command."""
    wandb = [str(Path(sys.executable).with_name("wandb")), "sync", *map(str, arguments)]
    own = os.environ | server.environment
    return subprocess.run(wandb, env=own, capture_output=True, cwd=ROOT, timeout=120).returncode


def curves(results: Path) -> bytes:
    (path,) = results.glob("*/*/seed=0/curves.csv")
    return path.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The curves of the same training without a logger."""
    results = tmp_path_factory.mktemp("alone")
    assert train(None, results, BUG, "logger=none").returncode == 0
    return curves(results)


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """A server that took a whole run, and the folder of its results."""
    with Server() as server:
        results = tmp_path_factory.mktemp("online")
        done = train(server, results, BUG, "logger=wandb")
        assert (done.returncode, done.stderr) == (0, "")
        assert server.unanswered == []
        yield server, results, done


def test_a_run_arrives_row_by_row(online, alone):
    server, results, _ = online
    seed = server.run("-0")
    assert curves(results) == alone
    (path,) = results.glob("*/*/seed=0/curves.csv")
    table = read_table(path)
    steps = [int(row["step"]) for row in table]
    assert [row["step"] for row in seed.rows] == steps
    for row, sent in zip(table, seed.rows, strict=True):
        assert {k: v for k, v in row.items() if k in sent and k != "step"} == {
            k: v for k, v in sent.items() if k in row and k != "step"
        }
    assert (seed.exit_code, seed.config["name"], seed.fields["jobType"]) == (0, "planted_bug", "seed")


def test_the_verdict_its_artifact_and_an_alert_arrive(online):
    server, results, done = online
    verdict = server.run("-verdict")
    (folder,) = results.glob("*/*/verdict.json")
    told = json.loads(folder.read_text())
    assert (verdict.summary["verdict"], verdict.summary["headline"]) == ("bug", told["headline"])
    (alert,) = verdict.alerts
    assert (alert["severity"], alert["text"]) == ("ERROR", told["headline"])
    assert alert["title"].startswith("planted_bug ")
    assert alert["title"].endswith(": bug")
    (artifact,) = server.artifacts.values()
    assert artifact["committed"]
    assert artifact["files"]["report.html"] == folder.with_name("report.html").read_bytes()
    assert f"{server.url}/{ENTITY}/driftlab/runs/{verdict.id}" in done.stdout


def test_a_run_that_was_killed_goes_on_in_the_same_run(tmp_path):
    with Server() as server:
        settings = ("+experiment=control", "logger=wandb", "checkpoint_every=0", "steps=60")
        own = os.environ | server.environment | {"OMP_NUM_THREADS": "1"}
        begun = subprocess.Popen(
            command(tmp_path, *settings), env=own, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        until = time.monotonic() + 120
        kept = "*/*/seed=0/checkpoint/*.safetensors"
        while not (server.runs and any(tmp_path.glob(kept))) and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(begun.pid, 9)
        begun.wait()
        assert train(server, tmp_path, *settings).returncode == 0
        seed = server.run("-0")
        steps = [row["step"] for row in seed.rows]
        assert steps == sorted(set(steps))
        assert seed.resumed
        (path,) = tmp_path.glob("*/*/seed=0/curves.csv")
        assert set(steps) == {int(row["step"]) for row in read_table(path)}


def test_an_offline_run_is_synced_later(tmp_path, alone):
    with Server() as server:
        done = train(server, tmp_path, BUG, "logger=wandb", WANDB_MODE="offline")
        assert (done.returncode, server.runs) == (0, {})
        assert synced(server, *tmp_path.glob("*/*/*/wandb/offline-run-*")) == 0
        seed = server.run("-0")
        assert [row["step"] for row in seed.rows] == list(range(4))
        verdict = server.run("-verdict")
        assert [alert["severity"] for alert in verdict.alerts] == ["ERROR"]


class Away:
    """The server goes away when a run has begun."""

    def __init__(self, server: Server):
        self.server = server

    def __call__(self, path: str, operation: str) -> int | None:
        return 503 if self.server.runs else None


TROUBLES = {
    "slow": (lambda server: lambda path, operation: time.sleep(0.2), ""),
    "refuses": (lambda server: lambda path, operation: 403, "is kept offline"),
    "breaks": (lambda server: lambda path, operation: 500 * (operation == "UpsertBucket"), "is kept offline"),
    "goes away": (Away, "wandb sync --no-skip-online"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_training_does_not_wait_for_a_server(tmp_path, alone, trouble):
    behave, said = TROUBLES[trouble]
    with Server() as server:
        server.trouble = behave(server)
        done = train(server, tmp_path, BUG, "logger=wandb", "logger.patience=4")
        assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
        assert curves(tmp_path) == alone
        assert said in " ".join((done.stdout + done.stderr).split())
        if trouble == "slow":
            assert [row["step"] for row in server.run("-0").rows] == list(range(4))
            assert server.run("-verdict").exit_code == 0
    if trouble == "goes away":
        (kept,) = tmp_path.glob("*/*/seed=0/wandb/run-*")
        with Server() as later:
            assert synced(later, "--no-skip-online", kept) == 0
            assert [row["step"] for row in later.run("-0").rows] == list(range(4))


FALLS = """
import glob
import os

import torch


class Falls(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(3072, 10)

    def forward(self, x):
        if glob.glob(os.environ["FALLS_BESIDE"]):
            raise RuntimeError("the scores fell over")
        return self.line(x.flatten(1))
"""


def test_a_seed_that_ends_in_an_error_sends_an_alert(tmp_path):
    (tmp_path / "falls.py").write_text(FALLS)
    with Server() as server:
        settings = ("+experiment=control", "logger=wandb", "model._target_=falls.Falls", "checkpoint_every=0")
        beside = str(tmp_path / "runs/*/*/seed=0/checkpoint/*")
        done = train(server, tmp_path / "runs", *settings, PYTHONPATH=str(tmp_path), FALLS_BESIDE=beside)
        assert done.returncode == 2
        (seed,) = server.runs.values()
        ((alert, code),) = ((alert, seed.exit_code) for alert in seed.alerts)
        assert alert["title"].endswith("seed=0: crashed")
        assert "the scores fell over" in alert["text"]
        assert code == 1
