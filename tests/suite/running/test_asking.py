"""Experiments that answer a question: the files they leave, what they do again, what they say."""

import html
import json
import sys

import pytest
import yaml

from driftlab.record.seed_record import read_table
from experiments import gradient_check, split_gradient
from suite.command.configuration import composed
from tests.suite.refusing import assert_refused

QUICK = ("faults=false", "case.points=4", "curve.points=2", "curve.decades=3")


@pytest.fixture
def ask(tmp_path):
    """Run a kind in this process; returns the experiment's folder."""

    def run(kind, *overrides: str):
        name = kind.__name__.rpartition(".")[2]
        shared = [f"+experiment={name}", "scale=smoke", "logger=none", "workers=1", f"results={tmp_path}"]
        kind.run(composed(*shared, *overrides))
        folders = sorted((tmp_path / name).iterdir(), key=lambda p: p.stat().st_mtime)
        return folders[-1]

    return run


def test_leaves_the_files_of_the_contract_and_its_answer(ask):
    folder = ask(gradient_check, *QUICK, "seed=0..1")
    assert set(yaml.safe_load((folder / "experiment.yaml").read_text())) >= {"name", "case", "seed", "scale"}
    verdict = json.loads((folder / "verdict.json").read_text())
    keys = {"schema", "experiment", "digest", "verdict", "headline", "where", "seeds", "evidence", "outcomes"}
    assert keys | {"environment"} <= set(verdict)
    assert (verdict["verdict"], verdict["seeds"]) == ("round_off", [0, 1])
    for seed in (0, 1):
        run = json.loads((folder / f"seed={seed}" / "run.json").read_text())
        assert {"outcome", "dataset", "environment", "times", "arms", "probes"} <= set(run)
        assert (folder / f"seed={seed}" / "measurements.json").exists()
    answer = json.loads((folder / "answer.json").read_text())
    for table in answer["tables"]:
        assert table["conclusion"]
        lines = (folder / "tables" / f"{table['name']}.csv").read_text().splitlines()
        assert len(lines) == len(table["rows"]) + 1
    for figure in answer["figures"]:
        for suffix, magic in (("svg", b"<?xml"), ("png", b"\x89PNG")):
            assert (folder / "figures" / f"{figure['name']}.{suffix}").read_bytes().startswith(magic)
    page = (folder / "report.html").read_text()
    assert all(table["title"] in html.unescape(page) for table in answer["tables"])
    assert "#06060" not in page  # every stand-in colour was replaced
    assert "Outcomes over seeds" not in page  # nothing was trained


def test_a_pair_leaves_curves_by_the_names_of_the_contract(ask):
    folder = ask(split_gradient, "case.out_channels=5")
    rows = read_table(folder / "seed=0" / "curves.csv")
    assert rows[0]["step"] == 0
    assert {"loss/reference.float64", "gradient_distance/candidate.float32"} <= set(rows[0])
    run = json.loads((folder / "seed=0" / "run.json").read_text())
    asked = {"determinism", "function", "update", "repeat", "last_step"}
    assert asked <= {found["probe"] for found in run["probes"]}  # what was found of the pair is kept


def test_what_is_done_is_not_measured_again_and_more_seeds_join(ask):
    folder = ask(gradient_check, *QUICK, "seed=0")
    first = (folder / "seed=0" / "run.json").read_bytes()
    assert ask(gradient_check, *QUICK, "seed=0..1") == folder
    assert (folder / "seed=0" / "run.json").read_bytes() == first
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0, 1]


def test_other_settings_are_another_experiment(ask):
    assert ask(gradient_check, *QUICK) != ask(gradient_check, *QUICK, "case.eps=1e-4")


def test_a_setting_without_effect_is_said(train):
    done = train("+experiment=gradient_check", *QUICK, "optimizer.lr=3")
    assert done.status == 0
    assert "optimizer.lr=3 changes nothing: gradient_check trains no network" in done.out


REFUSED = {
    "an eps of 0": (["case.eps=0"], "case.eps=0 must be a finite number above 0"),
    "half a point": (["case.points=0.5"], "case.points=0.5 must be a whole number"),
    "no such case": (["case.target=no.such.thing"], "case.target=no.such.thing cannot be imported"),
    "a case that fails": (["case.options.rows=-1"], "failed"),
    "a verdict that is none": (["fail_on=[wrong]"], "fail_on=wrong is unknown"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_a_bad_setting_is_one_line(train, arguments, said):
    assert_refused(train("+experiment=gradient_check", *QUICK, *arguments), said)


def test_fail_on_lists_the_verdict(train):
    assert train("+experiment=gradient_check", *QUICK, "fail_on=[round_off]").status == 3


@pytest.mark.service
def test_wandb_holds_the_curves_and_the_settings(train_afresh, tmp_path):
    from tests.suite.logged import records_of

    done = train_afresh("+experiment=split_gradient", "logger=wandb", "case.out_channels=5")
    assert done.status == 0, done.err
    (home,) = tmp_path.glob("split_gradient/*/seed=0")
    (file,) = home.rglob("*.wandb")
    entries = records_of(file)
    rows = [e["history"]["item"] for e in entries if e["type"] == "history"]
    for row, logged in zip(read_table(home / "curves.csv"), rows, strict=True):
        assert row.items() <= logged.items()


def test_a_published_page_says_how_it_was_made(ask, tmp_path):
    from suite.reading.publishing import publish

    folder = ask(gradient_check, *QUICK, "seed=0..1")
    text = publish(folder, tmp_path / "published").read_text()
    answer = json.loads((folder / "answer.json").read_text())
    assert "seed=0..1" in text
    assert "n = 2 seeds" in text
    assert "torch" in text
    # A long answer stands there as a list, "How sure" between its first four sentences and the others.
    places = [text.find(sentence) for sentence in answer["sentence"].split(". ")]
    assert len(places) > 4
    assert -1 not in places
    assert places == sorted(places)
    for figure in answer["figures"]:
        assert (tmp_path / "published" / "gradient_check" / "figures" / f"{figure['name']}.png").exists()
    assert str(tmp_path) not in text
    assert sys.prefix not in text
