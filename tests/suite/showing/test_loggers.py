"""What the loggers hold of given rows, verdicts and answers, read back with their own readers."""

import glob
import json
import shlex
import subprocess
import sys

import pytest
from matplotlib.image import imsave
from omegaconf import OmegaConf

from driftlab.record.seed_record import read_table
from driftlab.report.sections import Answer, Figure, Table
from suite.showing.loggers import MetricsLogger, log_verdict
from tests.suite.conftest import ROOT
from tests.suite.logged import events_in, records_of, rows, summary, text_of

HOST = "machine-by-name"
SETTINGS = {
    "name": "named",
    "results": "elsewhere",
    "rerun": False,
    "expected": "bug",
    "data": {"name": "shapes", "root": "/data/of/somebody"},
    "optimizer": {"lr": 0.25},
}
RECORD = {
    "outcome": "finished",
    "dataset": {"name": "shapes", "stand_in": True},
    "environment": {"device": "cpu"},
    "arms": {
        "reference.float32": {"outcome": "finished", "blown_up_at": None},
        "candidate.float32": {"outcome": "blew_up", "blown_up_at": 3},
    },
    "times": {"seconds": 1.5},
}
VERDICT = {
    "verdict": "bug",
    "headline": "not the same function",
    "where": {"module": "layer1.conv", "pass": "input gradient", "step": 2},
    "seeds": [0, 1],
    "evidence": [
        {
            "probe": "function",
            "question": "Do they?",
            "measured": 0.5,
            "threshold": None,
            "supports": "bug",
            "reading": "|a| > |b|",
        },
        {
            "probe": "repeat",
            "question": "Again?",
            "measured": "inf",
            "threshold": 1.0,
            "supports": None,
            "reading": "no",
        },
    ],
    "outcomes": {
        "fell_over": {"reference.float32": {"0": False, "1": True}},
        "discordant": {},
        "mcnemar_p": {},
    },
    "environment": {"device": "cpu"},
    "dataset": {"name": "shapes", "stand_in": True},
}
ANSWER = Answer(
    "It is.",
    [Table("errors", "errors", {"k": "case", "e": "error"}, [{"k": "a", "e": 1e-9}], "small")],
    [Figure("sweep", "a sweep", lambda canvas, look: None, "what is seen")],
)


def settings(logger: str):
    return OmegaConf.create(SETTINGS | {"logger": {"name": logger, "project": "p", "entity": None}})


@pytest.fixture
def experiment(tmp_path):
    """A folder with a verdict, a report and a figure."""
    (tmp_path / "figures").mkdir()
    imsave(tmp_path / "figures" / "sweep.png", [[0.0, 1.0], [1.0, 0.0]])
    (tmp_path / "verdict.json").write_text(json.dumps(VERDICT))
    (tmp_path / "report.html").write_text("<p>a report</p>")
    return tmp_path


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.service
def test_a_seed_that_goes_on_leaves_one_run_with_every_step_once(tmp_path, offline):
    for steps in ([0, 1, 2], [0, 1, 2, 3, 7]):
        logger = MetricsLogger(settings("wandb"), "abc", 0, tmp_path)
        for step in steps:
            logger.log(step, {"loss/reference.float32": float(step)})
        logger.finish(RECORD)
    (file,) = tmp_path.rglob("*.wandb")
    entries = records_of(file)
    assert [row["step"] for row in rows(entries)] == [0, 1, 2, 3, 7]
    assert summary(entries)["blown_up_at/candidate.float32"] == 3
    assert "/data/of/somebody" not in json.dumps(entries)


@pytest.mark.service
def test_numbers_that_are_none_are_left_out(tmp_path, offline):
    logger = MetricsLogger(settings("wandb"), "abc", 0, tmp_path)
    logger.log(0, {"loss/candidate.float32": 2.0, "accuracy/candidate.float32": 0.5})
    logger.log(1, {"loss/candidate.float32": float("nan"), "accuracy/candidate.float32": float("inf")})
    logger.finish(RECORD)
    (file,) = tmp_path.rglob("*.wandb")
    assert summary(records_of(file))["loss/candidate.float32"] == 2.0
    assert "loss/candidate.float32" not in rows(records_of(file))[1]


@pytest.mark.service
def test_a_verdict_again_takes_the_place_of_the_first_and_shows_tables_and_figures(experiment, offline):
    for _ in range(2):
        where = log_verdict(settings("wandb"), "abc", experiment, ANSWER)
    (file,) = experiment.rglob("*.wandb")
    assert where["W&B"].startswith("offline, ")
    *command, runs = shlex.split(where["to sync"])
    assert command == ["wandb", "sync"]
    assert glob.glob(runs) == [str(file.parent)]
    entries = records_of(file)
    told = summary(entries)
    assert (told["where"]["module"], told["where"]["pass"]) == ("layer1.conv", "input gradient")
    assert told["as_expected"]
    assert (told["figures/sweep._type"], told["figures/sweep.caption"]) == ("image-file", "what is seen")
    files = file.parent / "files"
    assert json.loads((files / told["tables/errors.path"]).read_text())["data"] == [["a", 1e-9]]
    assert json.loads((files / told["outcomes.path"]).read_text())["data"][0][:3] == [
        "reference.float32",
        1,
        2,
    ]
    assert "a report" in (files / told["report.path"]).read_text()


@pytest.mark.service
def test_wandb_that_cannot_start_says_so_in_one_line(tmp_path, monkeypatch):
    from suite.command.errors import ConfigurationError

    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(ConfigurationError, match=r"logger=wandb cannot start \(.*write logger=none"):
        MetricsLogger(settings("wandb"), "abc", 0, tmp_path).log(0, {"x": 1.0})


def test_tensorboard_shows_tables_and_figures_and_names_no_host(experiment, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    log_verdict(settings("tensorboard"), "abc", experiment, ANSWER)
    log_verdict(settings("tensorboard"), "abc", experiment, ANSWER)
    events = events_in(experiment / "verdict" / "tensorboard")
    assert len(events.Images("figures/sweep")) == 1
    assert "| a | 1e-09 |" in text_of(events, "tables/errors")
    assert "\\|a\\| > \\|b\\|" in text_of(events, "evidence")
    assert "layer1.conv" in text_of(events, "verdict")
    # the settings, in TensorBoard's own tab
    (start,) = events.PluginTagToContent("hparams").keys() & {"_hparams_/session_start_info"}
    assert b"digest" in events.PluginTagToContent("hparams")[start]
    assert not [p for p in experiment.rglob("*") if HOST in p.name]


def test_csv_holds_the_same_names_and_every_step_once(tmp_path):
    for steps in ([0, 1], [0, 1, 2]):
        logger = MetricsLogger(settings("csv"), "abc", 0, tmp_path)
        for step in steps:
            logger.log(step, {"weight_distance/control.float32": 0.5 * step})
        logger.finish(RECORD)
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert [row["step"] for row in read_table(metrics)] == [0, 1, 2]
    assert "weight_distance/control.float32" in metrics.read_text().splitlines()[0]


def test_without_a_logger_nothing_is_imported_and_nothing_left(experiment):
    before = sorted(experiment.rglob("*"))
    code = f"""
import sys
from pathlib import Path
from omegaconf import OmegaConf
import experiments.training, suite.running.asking
from suite.showing.loggers import MetricsLogger, log_verdict
settings, home = OmegaConf.create({{"logger": {{"name": "none"}}}}), Path({str(experiment)!r})
logger = MetricsLogger(settings, "abc", 0, home)
logger.log(0, {{"x": 1.0}})
logger.finish({{}})
log_verdict(settings, "abc", home)
print(sorted({{"wandb", "lightning", "tensorboard"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
    assert sorted(experiment.rglob("*")) == before
