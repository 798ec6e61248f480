"""``rewrites=[...]``: several candidates against one reference, each as if it had been asked for alone."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from suite.reading.archive import find_runs
from tests.suite.conftest import ROOT
from tests.suite.refusing import assert_refused
from tests.suite.running.test_workers import command, settings, tables, trained, wait_until

FOUR = "{target: models.rewrites.split_conv.split_conv, options: {parts: 4}}"
WRONG = "models.rewrites.planted_bug.split_without_input_gradient"
THREE = f"rewrites=[split_conv,{FOUR},{WRONG}]"
SIZES = ["+experiment=split_conv", "steps=12", "float64_steps=4", "local.windows=[3]", "local.updates=2"]
ALONE = {
    "split_conv": [
        "rewrite.target=models.rewrites.split_conv.split_conv",
        "rewrite.options.dim=out",
        "rewrite.options.parts=2",
    ],
    "four": ["rewrite.target=models.rewrites.split_conv.split_conv", "rewrite.options.parts=4"],
    "wrong": [f"rewrite.target={WRONG}"],
}


@pytest.fixture(scope="module")
def alone(forked, tmp_path_factory):
    """What each rewrite gives by itself."""
    results = tmp_path_factory.mktemp("alone")
    for own in ALONE.values():
        ended = forked.run(*settings(results, *SIZES, *own, "seed=0"))
        assert ended.status == 0, ended.out
    return results


def verdicts(results: Path) -> dict[str, str]:
    found = {path.parent.name: json.loads(path.read_text()) for path in results.rglob("verdict.json")}
    return {digest: said["verdict"] for digest, said in found.items()}


@pytest.mark.slow
def test_each_leaves_what_it_leaves_alone(forked, alone, tmp_path):
    done = forked.run(*settings(tmp_path, *SIZES, THREE, "seed=0"))
    assert done.status == 0, done.out
    assert tables(tmp_path) == tables(alone)
    assert verdicts(tmp_path) == verdicts(alone)
    assert sorted(verdicts(tmp_path).values()) == ["bug", "round_off", "round_off"]
    for path in tmp_path.rglob("local.csv"):
        assert path.read_bytes() == (alone / path.relative_to(tmp_path)).read_bytes()
    listed = (tmp_path / "split_conv.txt").read_text()
    assert all(" ".join(own) in listed.replace("++", "") for own in ALONE.values())
    for digest in verdicts(tmp_path):
        assert done.out.count(digest) >= 2  # in the plan, and in the table at the end
    assert done.out.count("by the probes alone") == 3


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["together", "in workers"])
def test_killed_they_go_on_together(alone, tmp_path, killed):
    how = ["workers=2", "seed=0..1"] if killed == "in workers" else ["seed=0"]
    run = command(tmp_path, *SIZES, THREE, *how)
    begun = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: trained(tmp_path))
    os.killpg(begun.pid, signal.SIGKILL)
    begun.wait()
    assert not list(tmp_path.rglob("run.json"))
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mine = {name: content for name, content in tables(tmp_path).items() if "seed=0" in name}
    assert mine == tables(alone)


@pytest.mark.slow
def test_what_is_done_is_left_and_the_rest_trains_together(forked, alone, tmp_path):
    first = forked.run(*settings(tmp_path, *SIZES, *ALONE["split_conv"], "seed=0"))
    assert first.status == 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("run.json")}
    done = forked.run(*settings(tmp_path, *SIZES, THREE, "seed=0", "stop_on_bug=false"))
    assert done.status == 0, done.out
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert tables(tmp_path) == tables(alone)


def test_one_that_ends_with_its_probes_does_not_hold_up_the_others(forked, tmp_path):
    few = ["+experiment=split_conv", "steps=3", "float64_steps=2", "local.windows=[]", "stop_on_bug=true"]
    rewrites = f"rewrites=[{WRONG},split_conv]"
    done = forked.run(*settings(tmp_path, *few, rewrites, "seed=0", "fail_on=[bug]"))
    assert done.status == 3, done.out
    steps = {}
    for path in tmp_path.rglob("run.json"):
        run = json.loads(path.read_text())
        steps[verdicts(tmp_path)[run["digest"]]] = run["arms"]["candidate.float32"]["horizon"]
    assert steps == {"bug": 0, "round_off": 3}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("rewrites=[]", "rewrites=[] names no rewrite: write rewrites=[package.module.function,"),
        ("rewrites=split_conv", "names no rewrite"),
        (f"rewrites=[{','.join(f'a.b{n}' for n in range(27))}]", "names 27 rewrites: at most 26 at a time"),
        ("rewrites=[split_con]", "split_con is no function and no experiment: did you mean split_conv"),
        ("rewrites=[kinks]", "the experiment kinks has no rewrite of its own"),
        ("rewrites=[split_conv,split_conv]", "split_conv twice: leave one of them out"),
        ("rewrites=[{options: {parts: 2}}]", "is no rewrite: write rewrites="),
        ("rewrites=[split_conv,my.own]", "rewrite.target=my.own"),
    ],
)
def test_what_is_no_list_of_rewrites_is_one_line(train, tmp_path, given, text):
    assert_refused(train("+experiment=split_conv", given), text)
    assert not list(tmp_path.rglob("seed=*"))


@pytest.mark.parametrize("given", ["rewrites=[split_conv]", "rewrites=split_conv"])
def test_a_question_has_no_use_for_them(train, given):
    assert_refused(train("+experiment=kinks", given), "kinks has no use for it")


@pytest.mark.slow
def test_one_page_shows_them_side_by_side(forked, tmp_path):
    few = ["+experiment=split_conv", "steps=2", "float64_steps=2", "local.windows=[]"]
    assert forked.run(*settings(tmp_path, *few, f"rewrites=[split_conv,{WRONG}]", "seed=0")).status == 0
    page = (tmp_path / "split_conv.rewrites.html").read_text()
    assert "round_off, bug" in page
    links = re.findall(r'href="(split_conv/[^"]+)"', page)
    assert len(links) == 2
    assert all((tmp_path / link).is_file() for link in links)
    for arm in ("A candidate.float32", "B candidate.float64", "control control.float32"):
        assert f'data-arm="{arm}"' in page
    below = find_runs([str(path) for path in sorted(tmp_path.iterdir())])  # as a shell expands DIR/*
    assert sorted(run.name for run in below) == sorted(link.split("/")[1] for link in links)


@pytest.mark.slow
def test_the_page_of_a_training_in_float64_alone(forked, tmp_path):
    few = ["+experiment=split_conv", "steps=2", "float64_steps=2", "local.windows=[]", "dtypes=[float64]"]
    done = forked.run(*settings(tmp_path, *few, f"rewrites=[split_conv,{WRONG}]", "seed=0"))
    assert done.status == 0, done.out
    assert "final drift, float64" in (tmp_path / "split_conv.rewrites.html").read_text()


@pytest.mark.slow
def test_a_sweep_has_a_job_a_seed_and_one_end(train_afresh, tmp_path):
    few = ["+experiment=split_conv", "steps=2", "float64_steps=2", "local.windows=[]"]
    done = train_afresh("-m", *few, f"rewrites=[split_conv,{WRONG}]", "seed=0,1", "fail_on=[bug]")
    assert done.status == 3, done.err
    assert sorted(verdicts(tmp_path).values()) == ["bug", "round_off"]
    assert len(list(tmp_path.rglob("run.json"))) == 4
    assert "rewrites.html" in done.out


def test_each_is_shown_as_it_would_run(train):
    shown = train("+experiment=split_conv", f"rewrites=[split_conv,{WRONG}]", "--cfg", "job", "--resolve")
    first, second = shown.out.split("---\n")
    assert "target: models.rewrites.split_conv.split_conv" in first
    assert f"target: {WRONG}" in second
    assert "rewrites:" not in shown.out
