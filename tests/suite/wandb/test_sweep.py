"""W&B's own agent carries out a sweep; the workspace and the report of a project are saved and replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

from tests.suite.conftest import ROOT
from tests.suite.wandb.answers import ENTITY
from tests.suite.wandb.server import Server
from tests.suite.wandb.test_online import SHORT

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SWEEP = ROOT / "scripts" / "wandb_sweep.yaml"


def called(server: Server, *command: str | Path, **more: str) -> subprocess.CompletedProcess:
    own = os.environ | server.environment | {"OMP_NUM_THREADS": "1"} | more
    own["PATH"] = f"{BIN}{os.pathsep}{own['PATH']}"
    return subprocess.run(
        [str(part) for part in command], env=own, cwd=ROOT, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A server that an agent asked for the runs of the committed sweep, each with small settings."""
    folder = tmp_path_factory.mktemp("sweep")
    told = yaml.safe_load(SWEEP.read_text())
    short = [setting for setting in SHORT.split() if not setting.startswith("seed=")]
    told["command"] = [*told["command"], *short, f"results={folder}/runs"]
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(told))
    with Server() as server:
        made = called(server, BIN / "wandb", "sweep", file, WANDB_DIR=str(folder))
        assert made.returncode == 0, made.stderr
        (sweep,) = server.sweeps
        agent = called(server, BIN / "wandb", "agent", f"{ENTITY}/driftlab/{sweep}", WANDB_DIR=str(folder))
        assert agent.returncode == 0, agent.stderr
        assert server.unanswered == []
        yield server, server.sweeps[sweep]


def test_each_planned_run_is_the_verdict_of_its_settings(swept):
    server, sweep = swept
    assert [run["rewrite.options.parts"] for run in sweep["runs"].values()] == [2, 4]
    for name, planned in sweep["runs"].items():
        run = server.runs[name]
        assert (run.fields["sweep"], run.exit_code) == (sweep["name"], 0)
        assert run.summary["verdict"] == "round_off"
        assert run.config["rewrite"]["options"]["parts"] == planned["rewrite.options.parts"]
        assert run.config["seeds"] == [0, 1, 2]


def test_the_seeds_are_runs_of_their_own_beside_the_sweep(swept):
    server, sweep = swept
    seeds = [run for name, run in server.runs.items() if name not in sweep["runs"]]
    assert len(seeds) == 6
    assert {run.fields.get("sweep") for run in seeds} == {None}
    assert all([row["step"] for row in run.rows] == list(range(4)) for run in seeds)
    groups = {run.fields["groupName"] for run in server.runs.values()}
    assert len(groups) == 2


def test_workspace_and_report_are_saved_and_replaced():
    script = (sys.executable, ROOT / "scripts" / "wandb_dashboard.py")
    with Server() as server:
        first = called(server, *script)
        assert first.returncode == 0, first.stderr
        workspace, report = first.stdout.split()
        assert (urlparse(report).query, server.projects) == ("", ["driftlab"])
        kept = dict(server.views)
        assert [view["type"] for view in kept.values()] == ["project-view", "runs"]
        assert all(json.loads(view["spec"]) for view in kept.values())
        again = called(server, *script, "--workspace", workspace, "--report", report)
        assert again.stdout == first.stdout, again.stderr
        assert list(server.views) == list(kept)
        assert server.unanswered == []


def test_a_server_that_refuses_is_one_line():
    with Server() as server:
        server.trouble = lambda path, operation: 403
        done = called(server, sys.executable, ROOT / "scripts" / "wandb_dashboard.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: W&B refuses (")
