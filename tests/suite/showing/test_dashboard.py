"""The specs of the W&B workspace and report, built without a login and without a network."""

import json
import os
import subprocess
import sys

import pytest

from driftlab.record.seed_record import CURVES, EVALUATIONS
from suite.showing import dashboard
from tests.suite.conftest import ROOT

SCRIPT = str(ROOT / "scripts" / "wandb_dashboard.py")


@pytest.fixture(scope="module")
def specs():
    built = dashboard.workspace("my-project", "my-team"), dashboard.report("my-project", "my-team")
    return dashboard.specs(*built)


@pytest.fixture
def script(tmp_path):
    """Run the script as somebody whom W&B does not know."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
        command = [sys.executable, SCRIPT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)

    return run


def charts(panels):
    return {
        p["config"]["chartTitle"]: p["config"] for p in panels if p["viewType"] == "Run History Line Plot"
    }


def of_workspace(spec):
    sections = spec["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections}


def of_report(spec):
    blocks = [b for b in spec["report"]["spec"]["blocks"] if b["type"] == "panel-grid"]
    return [(b["metadata"]["runSets"][0], b["metadata"]["panelBankSectionConfig"]["panels"]) for b in blocks]


def test_every_column_of_curves_and_evaluations_has_a_chart_on_the_step_axis(specs):
    in_workspace = [p for panels in of_workspace(specs).values() for p in panels]
    in_report = [p for _, panels in of_report(specs) for p in panels]
    for panels in (in_workspace, in_report):
        drawn = charts(panels).values()
        named = {metric.rpartition("/")[0] for c in drawn for metric in c["metrics"]}
        assert named == {*CURVES, *EVALUATIONS, "local/weight_distance", "local/growth"}
        assert {c["xAxis"] for c in drawn} == {"step"}
        assert all(
            "candidate.float32" in (shown := " ".join(c["metrics"])) or "candidate.16-mixed" in shown
            for c in drawn
        )


def test_distances_are_drawn_on_a_logarithmic_axis_with_the_controls_and_float64_beside(specs):
    drawn = charts(p for panels in of_workspace(specs).values() for p in panels)
    (distance,) = (c for c in drawn.values() if "weight_distance/candidate.float32" in c["metrics"])
    assert distance["yLogScale"]
    arms = {metric.split("/")[1] for metric in distance["metrics"]}
    assert arms >= {"candidate.float64", "control.float32", "control.float64"}


def test_arms_in_16_bits_are_drawn_where_a_run_has_them(specs):
    drawn = charts(p for panels in of_workspace(specs).values() for p in panels).values()
    for kind, beside in (("weight_distance", "reference.float32"), ("loss", "reference.bf16-mixed")):
        (chart,) = (c for c in drawn if f"{kind}/candidate.float32" in c["metrics"])
        wanted = [beside, "candidate.bf16-mixed", "control.16-mixed", "reference.bf16-true"]
        assert {f"{kind}/{arm}" for arm in wanted} <= set(chart["metrics"])


def test_seeds_become_the_median_and_range_of_their_experiment(specs):
    for chart in charts(p for panels in of_workspace(specs).values() for p in panels).values():
        assert (chart["groupBy"], chart["groupAgg"], chart["groupArea"]) == (
            "run.value",
            "median",
            "minmax",
        )
        assert not chart["smoothingWeight"]


def test_verdict_evidence_and_report_come_first(specs):
    assert next(iter(of_workspace(specs))) == "Verdicts"
    runs, panels = of_report(specs)[0]
    assert runs["filters"]["filters"][0]["value"] == "verdict"
    written = json.dumps(panels)
    assert '"evidence"' in written
    assert '"report"' in written
    columns = specs["workspace"]["spec"]["section"]["runSets"][0]["runFeed"]["columnPinned"]
    assert {"summary:verdict", "summary:headline", "config:dataset.value.stand_in"} <= set(columns)


def test_the_specs_are_of_the_project_that_was_asked_for(specs):
    assert (specs["workspace"]["project"], specs["workspace"]["entity"]) == ("my-project", "my-team")
    project = specs["report"]["project"]
    assert (project["name"], project["entityName"]) == ("my-project", "my-team")
    assert all(runs["project"] is None for runs, _ in of_report(specs))  # the report's own


def test_what_is_sent_takes_the_place_of_the_earlier_one(monkeypatch):
    sent = []
    saving = {"save": lambda self: sent.append(self) or self, "url": property(lambda self: "https://there")}
    for kind in (dashboard.ws.Workspace, dashboard.wr.Report):
        for name, replaced in saving.items():
            monkeypatch.setattr(kind, name, replaced)
    earlier = dashboard.workspace("p", "e"), dashboard.report("p", "e")
    earlier[0]._internal_name, earlier[0]._internal_id, earlier[1].id = "nw-abc-v", "Vm1", "Vm2"
    monkeypatch.setattr(dashboard.ws.Workspace, "from_url", lambda url: earlier[0])
    monkeypatch.setattr(dashboard.wr.Report, "from_url", lambda url: earlier[1])
    new = dashboard.workspace("p", "e"), dashboard.report("p", "e")
    assert dashboard.saved(*new, "https://a", "https://b") == ["https://there"] * 2
    assert sent == list(new)
    assert (new[0]._to_model().name, new[0]._to_model().id, new[1]._to_model().id) == (
        "nw-abc-v",
        "Vm1",
        "Vm2",
    )


def test_a_dry_run_prints_the_specs_and_needs_no_login(script):
    done = script("--dry-run", "--project", "mine", "--entity", "my-team")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workspace"]["project"] == "mine"


def test_without_a_login_it_says_so_in_one_line(script):
    done = script()
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "wandb login" in done.stderr
