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


def begun(server: Server, folder: Path, *more: str, parts: tuple[int, ...] = (2, 4)) -> str:
    """The name of the committed sweep on this server, over these parts and with small settings."""
    told = yaml.safe_load(SWEEP.read_text())
    assert told["parameters"] == {"rewrite.options.parts": {"values": [2, 4]}}
    told["parameters"]["rewrite.options.parts"]["values"] = list(parts)
    short = [setting for setting in SHORT.split() if not setting.startswith("seed=")]
    told["command"] = [*told["command"], *short, *more, f"results={folder}/runs"]
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(told))
    made = called(server, BIN / "wandb", "sweep", file, WANDB_DIR=str(folder))
    assert made.returncode == 0, made.stderr
    (sweep,) = server.sweeps
    return sweep


def carried_out(server: Server, folder: Path, sweep: str) -> str:
    """What the agent printed, and the command that it started."""
    agent = called(server, BIN / "wandb", "agent", f"{ENTITY}/driftlab/{sweep}", WANDB_DIR=str(folder))
    assert agent.returncode == 0, agent.stderr
    return agent.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A server that an agent asked for the runs of the sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    with Server() as server:
        sweep = begun(server, folder)
        carried_out(server, folder, sweep)
        assert server.unanswered == []
        yield server, server.sweeps[sweep]


def test_an_agent_goes_on_where_the_server_takes_no_run(tmp_path):
    with Server() as server:
        sweep = begun(server, tmp_path, "seed=0", "logger.patience=4", parts=(2,))
        server.trouble = lambda path, operation: 500 * (operation == "UpsertBucket")
        said = carried_out(server, tmp_path, sweep)
    assert "is kept offline" in said
    assert "to sync" in said
    assert server.runs == {}
    assert len(list(tmp_path.rglob("offline-run-*/*.wandb"))) == 2


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
