"""The front door: what it lists, what it writes, what it refuses and how."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from driftlab.record.seed_record import read_table
from suite.command.configuration import composed
from suite.running.arguments import check_arguments
from suite.running.importing import imported, parameters
from tests.suite.conftest import ROOT, small
from tests.suite.programs import ONE_BLOCK
from tests.suite.refusing import assert_refused

EXPERIMENTS = sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module")
def finished(forked, tmp_path_factory):
    """The results of one run; to be copied where a test changes them."""
    results = tmp_path_factory.mktemp("finished")
    assert forked.run(*small(("+experiment=control",), results)).status == 0
    return results


@pytest.fixture
def run(finished, tmp_path):
    """The record of the finished run, in the test's own folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.rglob("run.json")
    return file


def test_help_lists_every_experiment(train_afresh):
    done = train_afresh("--help")
    assert done.status == 0
    for name in EXPERIMENTS:
        assert sum(line.split()[:1] == [name] for line in done.out.splitlines()) == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_short_and_opens_with_its_hypothesis_and_verdict(name):
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    settings = yaml.safe_load(text)
    assert len(text.splitlines()) <= 25
    assert settings["name"] == name
    assert settings["hypothesis"]
    assert f"Expected: {settings['expected']}" in text.replace("\n# ", " ")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_hands_its_rewrite_what_that_takes(name):
    """Also one that is made of another, whose options it inherits."""
    settings = OmegaConf.to_container(composed(f"+experiment={name}"))
    rewrite = settings.get("rewrite") or {"target": ""}
    if rewrite["target"]:
        function = imported("rewrite.target", rewrite["target"])
        known = list(parameters(function))[:1]
        check_arguments("rewrite.options", function, rewrite["options"] or {}, known=known)


REFUSED = {
    "unknown experiment": (["+experiment=split_convv"], "split_convv is unknown: did you mean split_conv?"),
    "no plus": (["experiment=split_conv"], "write +experiment=split_conv"),
    "no experiment": (["seed=3"], "no experiment"),
    "misspelt setting": (["+experiment=split_conv", "stepz=3"], "stepz is no setting: did you mean steps?"),
    "misspelt nested": (["+experiment=split_conv", "optimizer.lrr=3"], "did you mean optimizer.lr?"),
    "misspelt option": (
        ["+experiment=split_conv", "scale=smal"],
        "scale=smal is unknown: did you mean small?",
    ),
    "unknown option": (["--multi-run", "+experiment=control"], "--multi-run is no option"),
    "unknown data": (["+experiment=split_conv", "data=mnist"], "data=mnist is unknown"),
    "backward seeds": (["+experiment=split_conv", "seed=9..0"], "write seed=0..9"),
    "seeds of letters": (["+experiment=split_conv", "seed=a..b"], "seed=a..b is not a seed"),
    "target missing": (["+experiment=split_conv", "rewrite.target=no.such.thing"], "cannot be imported"),
    "target no path": (["+experiment=split_conv", "rewrite.target=thing"], "write package.module.function"),
    "target no function": (
        ["+experiment=split_conv", "rewrite.target=math.pi"],
        "is a float, not a function",
    ),
    "shape": (
        ["+experiment=split_conv", "rewrite.target=tests.suite.rewrites.other_shape"],
        "changes the output's shape from (2, 10) to (2, 5)",
    ),
    "no module": (
        ["+experiment=split_conv", "rewrite.target=tests.suite.rewrites.nothing"],
        "returned a NoneType",
    ),
    "raises": (
        ["+experiment=split_conv", "rewrite.target=tests.suite.rewrites.raising"],
        "ZeroDivisionError: division by zero (suite/rewrites.py:",
    ),
    "dtype": (
        ["+experiment=split_conv", "dtypes=[float32,float99]"],
        "float99 is unknown: choose from float64, float32, bf16-mixed, 16-mixed, bf16-true",
    ),
    "role": (["+experiment=split_conv", "roles=[reference,twin]"], "twin is unknown"),
    "number": (["+experiment=split_conv", "steps=many"], "steps=many must be a whole number"),
    "negative": (["+experiment=split_conv", "batch_size=-4"], "batch_size=-4 must be a whole number"),
    "verdict": (["+experiment=split_conv", "fail_on=[bugs]"], "bugs is unknown"),
    "results": (["+experiment=split_conv", "results=/proc/nowhere"], "cannot be written"),
    "data root": (["+experiment=split_conv", "data=folder", "data.root=/no/such/folder"], "/no/such/folder"),
    "device": (["+experiment=split_conv", "device=tpu"], "device=tpu is unknown"),
    "width": (["+experiment=grouped_conv", "model.width=3"], "width=3"),
    "rate": (
        ["+experiment=split_conv", "optimizer.lr=fast"],
        "optimizer.lr=fast must be a finite number",
    ),
    "schedule": (["+experiment=split_conv", "log_schedule.dense=0"], "log_schedule.dense=0 must be a whole"),
    "folder without root": (["+experiment=split_conv", "data=folder"], "data.root"),
    "kind": (["+experiment=split_conv", "kind=nothing"], "kind=nothing is unknown"),
    "syntax": (["+experiment=split_conv", "steps=[1,"], "steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_clear_line(train, case):
    arguments, message = REFUSED[case]
    assert_refused(train(*arguments), message)


@pytest.mark.parametrize("case", ["unknown experiment", "rate"])  # before torch is imported, and after
def test_a_fresh_python_says_no_more_than_that_line(train_afresh, case):
    arguments, message = REFUSED[case]
    assert_refused(train_afresh(*arguments), message)


def test_a_run_leaves_the_files_of_the_contract(train_afresh, tmp_path):
    done = train_afresh("+experiment=split_conv", "seed=[0,2]")
    assert done.status == 0, done.err
    (folder,) = (tmp_path / "split_conv").iterdir()
    verdict = json.loads((folder / "verdict.json").read_text())
    keys = [
        "schema",
        "experiment",
        "digest",
        "verdict",
        "headline",
        "where",
        "seeds",
        "evidence",
        "outcomes",
        "environment",
    ]
    assert set(keys) <= set(verdict)
    assert verdict["seeds"] == [0, 2]
    assert verdict["digest"] == folder.name
    for piece in verdict["evidence"]:
        always = {"probe", "question", "measured", "threshold", "supports", "reading", "status"}
        assert always <= set(piece) <= always | {"unit", "reason", "details"}
    page = (folder / "report.html").read_text()
    assert "python train.py +experiment=split_conv" in page
    assert "read it before you copy it" not in page
    assert yaml.safe_load((folder / "experiment.yaml").read_text())["steps"] == 6
    for seed in (0, 2):
        rows = read_table(folder / f"seed={seed}" / "curves.csv")
        assert [r["step"] for r in rows] == list(range(7))
        for kind in (
            "loss",
            "weight_distance",
            "gradient_distance",
            "logit_distance",
            "sign_flips",
            "accuracy",
        ):
            assert f"{kind}/candidate.float32" in rows[0]
        run = json.loads((folder / f"seed={seed}" / "run.json").read_text())
        assert run["outcome"] == "finished"
        assert run["dataset"]["stand_in"] is True
        assert run["environment"]["threads"] >= 1
        assert (folder / f"seed={seed}" / "checkpoint").is_dir()
    assert "STAND-IN" in done.out
    assert verdict["verdict"] in done.out


def test_a_finished_run_is_skipped_and_rerun_does_it_again(train, run):
    first, curves = run.stat().st_mtime_ns, (run.parent / "curves.csv").read_bytes()
    assert "done already" in train("+experiment=control").out
    assert run.stat().st_mtime_ns == first
    assert train("+experiment=control", "rerun=true").status == 0
    assert run.stat().st_mtime_ns > first
    assert (run.parent / "curves.csv").read_bytes() == curves


def test_the_exit_status_tells_of_a_listed_verdict(train):
    assert train("+experiment=planted_bug", ONE_BLOCK, "fail_on=[bug]").status == 3
    assert train("+experiment=planted_bug", ONE_BLOCK).status == 0
    assert train("+experiment=control", "fail_on=[bug,unstable]").status == 0


def test_multirun_gives_every_seed_a_job_and_judges_them_together(train, tmp_path):
    done = train("-m", "+experiment=control,precision", "seed=0..1")
    assert done.status == 0, done.err
    verdicts = {p.parent.parent.name: json.loads(p.read_text()) for p in tmp_path.rglob("verdict.json")}
    assert {name: v["seeds"] for name, v in verdicts.items()} == {"control": [0, 1], "precision": [0, 1]}


def test_a_sweep_judges_what_is_done_where_one_job_crashed(train, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFTLAB_TEST_CRASHED", str(tmp_path / "crashed"))
    target = "rewrite.target=tests.suite.rewrites.crashing_once"
    sweep = (
        "-m",
        "+experiment=split_conv",
        target,
        "dtypes=[float32]",
        "seed=0..2",
        "fail_on=[bit_identical]",
    )
    done = train(*sweep)
    assert done.status == 1
    assert "AttributeError: a fault of the program" in done.err
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["seeds"] == [1, 2]
    again = train(*sweep)
    assert again.status == 3, again.err  # no job of a sweep loses what fail_on asks
    assert json.loads(verdict.read_text())["seeds"] == [0, 1, 2]


SWEEPS = {
    "steps=6,-1": "steps=-1 must be a whole number of at least 1 (job +experiment=split_conv steps=-1;",
    "steps=-1,-2": "steps=-1 must be a whole number of at least 1 (job +experiment=split_conv steps=-1;",
    "rewrite.options.parts=2,two": "rewrite.options.parts=two does not fit",
    "optimizer=sgd,adam optimizer.momentum=0.9": "optimizer.momentum",
    "steps=6,-1 seed=0..3 hydra.sweeper.max_batch_size=1": "steps=-1 must be",
    "steps=6,-1 hydra/launcher=joblib": "steps=-1 must be",
    "steps=6,-1 hydra/launcher=submitit_slurm": "steps=-1 must be",
}


@pytest.mark.parametrize("settings", SWEEPS)
def test_what_one_job_of_a_sweep_cannot_have_is_refused_before_the_first_begins(train, tmp_path, settings):
    assert_refused(train("-m", "+experiment=split_conv", *settings.split()), SWEEPS[settings], tmp_path)


def test_a_sweep_for_a_cluster_is_held_to_the_nodes_and_not_to_this_machine(train):
    """Which has no GPU; with Slurm out of reach the sweep ends where it would be submitted."""
    done = train("-m", "+experiment=control", "hydra/launcher=submitit_slurm", "tf32=true", "device=cuda")
    assert "device=cuda" not in done.err
    done = train("-m", "+experiment=control", "hydra/launcher=joblib", "device=cuda")
    assert "device=cuda, but torch finds no CUDA device here" in done.err


def test_seeds_set_alone_are_another_experiment(train, run, tmp_path):
    train("+experiment=control", "seeds.init=7")
    train("+experiment=control", "seed=1")
    assert len(list((tmp_path / "control").iterdir())) == 2


def test_no_record_names_the_folders_of_the_machine(finished):
    (folder,) = finished.glob("control/*")
    for name in ("experiment.yaml", "report.html", "verdict.json", "seed=0/run.json"):
        assert str(finished) not in (folder / name).read_text()


def test_a_refusal_needs_no_torch():
    """What explains a command line is imported before anything heavy: seconds less for a misspelt setting."""
    code = "import sys, suite.command.explaining; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n"
