"""What the probes say is there before the training; where it is a bug, a seed may end with it."""

import json
import re

import pytest

from suite.command.configuration import digest
from suite.running import seed_run
from tests.suite.conftest import resolved
from tests.suite.programs import ONE_BLOCK

SMALL = [ONE_BLOCK, "probe_images=2", "batch_size=4", "eval_images=4"]
TRAINING = [*SMALL, "steps=4", "float64_steps=2", "workers=1", "threads=1", "local.windows=[]"]
WRONG = ["+experiment=planted_bug", *TRAINING]


@pytest.fixture
def before_training(monkeypatch, tmp_path):
    """What lies in the results when a training begins: the text of each page, the verdicts."""
    seen, fit = [], seed_run.fit

    def fitting(*arguments):
        pages = [page.read_text() for page in tmp_path.rglob("report.html")]
        seen.append((pages, list(tmp_path.rglob("verdict.json"))))
        fit(*arguments)

    monkeypatch.setattr(seed_run, "fit", fitting)
    return seen


def test_it_is_said_and_shown_before_the_first_training(judged, before_training, capsys):
    assert judged(*WRONG, "seed=0..1")["verdict"] == "bug"
    (page,), verdicts = before_training[0]
    headline, rest = re.search(r'class="headline">(.*?)</span>.*?class="rest">(.*?)</p>', page, re.S).groups()
    assert headline == "by the probes of seed 0 alone, before any update"
    assert rest.startswith("not the same function")
    assert not verdicts
    said = "".join(capsys.readouterr().out.split())
    assert said.count("bytheprobesalone:bug,notthesamefunction") == 1


def test_of_a_right_rewrite_the_training_decides(judged, before_training, capsys):
    found = judged("+experiment=split_conv", *TRAINING)
    assert found["verdict"] in ("round_off", "bit_identical")
    (page,), _ = before_training[0]
    assert "nothing beyond rounding so far; the training decides" in page
    assert "by the probes of seed" not in found["headline"]


def test_a_seed_may_end_with_its_bug(judged, tmp_path):
    found = judged(*WRONG, "seed=0..1", "stop_on_bug=true")
    assert found["verdict"] == "bug"
    assert found["seeds"] == [0, 1]
    for home in tmp_path.rglob("seed=?"):
        run = json.loads((home / "run.json").read_text())
        assert {arm["horizon"] for arm in run["arms"].values()} == {0}
        assert len((home / "curves.csv").read_text().splitlines()) == 2
    assert judged(*WRONG, "seed=0..1", "stop_on_bug=true") == found  # done: nothing is asked again


def test_it_is_another_experiment_where_it_is_asked_for():
    without, told, asked = (
        digest(resolved("planted_bug", *o)) for o in ([], ["stop_on_bug=false"], ["stop_on_bug=true"])
    )
    assert without == told != asked
