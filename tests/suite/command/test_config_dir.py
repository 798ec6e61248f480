"""``--config-dir``: one's own experiments, networks and data sets beside those of the suite."""

import json

import pytest
import yaml

EXPERIMENT = """\
# @package _global_
# Two halves of a linear layer are one. Expected: round_off.
defaults: [{override /model: rows}, {override /data: rows}]
name: halves
hypothesis: two halves of a linear layer are the whole
expected: round_off
batch_size: 8
rewrite: {target: tests.suite.own.by_halves}
local: {windows: []}
"""


@pytest.fixture
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    texts = {"experiment/halves": EXPERIMENT, "model/rows": "_target_: tests.suite.own.OfRows\n"}
    texts["data/rows"] = "_target_: tests.suite.own.Rows\nlength: 32\n"
    for name, text in texts.items():
        (folder / name).parent.mkdir()
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_its_experiments_are_listed(train, own):
    done = train("--help", "--config-dir", str(own))
    assert done.status == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert ["halves", "Two", "halves", "of", "a", "linear", "layer", "are", "one."] in lines
    assert "| rows" in done.out  # a data set


def test_its_experiments_are_shown_and_run(train, own, tmp_path):
    asked = ["+experiment=halves", "--config-dir", str(own), "data=rows"]
    shown = train(*asked, "--cfg", "job", "--resolve")
    assert (shown.status, shown.err) == (0, "")
    found = yaml.safe_load(shown.out)
    assert found["model"] == {"_target_": "tests.suite.own.OfRows"}
    assert found["data"] == {"_target_": "tests.suite.own.Rows", "length": 32}
    done = train(*asked)
    assert (done.status, done.errors) == (0, [])
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["verdict"] == "round_off"
    (run,) = tmp_path.rglob("run.json")
    command = json.loads(run.read_text())["command"]
    assert command.startswith(f"python train.py --config-dir {own} +experiment=halves")


def test_what_it_does_not_hold_is_one_line(train, own):
    done = train("+experiment=halvs", "--config-dir", str(own))
    assert done.errors == ["error: +experiment=halvs is unknown: did you mean halves?"]
    done = train("+experiment=halves")
    assert "+experiment=halves is unknown" in done.errors[0]
    done = train("+experiment=halves", "--config-dir", str(own), "data=row")
    assert "data=row is unknown: did you mean rows?" in done.errors[0]


def test_a_name_of_the_suites_own_is_refused(train, own):
    (own / "model" / "resnet18.yaml").write_text("_target_: tests.suite.own.Net\n")
    done = train("+experiment=halves", "--config-dir", str(own))
    assert "would never be read: model=resnet18 is the suite's own: rename it" in done.errors[0]
