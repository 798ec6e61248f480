"""scripts/judge.py: verdicts and reports again from what runs stored, and two experiments side by side."""

import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from driftlab.record import seed_record as records
from suite.reading.judging import AS_RECORDED
from tests.suite.conftest import ROOT

spec = spec_from_file_location("judge", ROOT / "scripts" / "judge.py")
script = module_from_spec(spec)
spec.loader.exec_module(script)

ARMS = {
    "reference.float64": None,
    "candidate.float64": "reference.float64",
    "control.float64": "reference.float64",
    "reference.float32": "reference.float64",
    "candidate.float32": "reference.float32",
    "control.float32": "reference.float32",
}
KINDS = ("weight_distance", "gradient_distance", "logit_distance")
UNIT = {"float32": 1e-7, "float64": 1e-16}


@pytest.fixture
def make_run(tmp_path):
    """``make_run(name, ...)`` writes an experiment that was never trained; returns its folder."""

    def make(name="split_conv", digest="0123456789", seeds=(0, 1), bug=False, folder=None, **settings):
        folder = folder or tmp_path / "runs" / name / digest
        config = {"name": name, "kind": "training", "hypothesis": "it is", "expected": None}
        config |= {"subject": "candidate", "optimizer": {"lr": 0.1}, "results": str(tmp_path)}
        records.write_whole(folder / "experiment.yaml", yaml.safe_dump(config | settings))
        for seed in seeds:
            write_seed(folder, name, digest, seed, bug)
        return folder

    return make


def write_seed(folder, name, digest, seed, bug):
    home = records.seed_folder(folder, seed)
    rows = [row(step, seed, bug) for step in range(5)]
    records.write_table(home / "curves.csv", records.columns(records.CURVES, ARMS), rows)
    last = {f"test_accuracy/{arm}": 0.7 + 0.01 * seed for arm in ARMS}
    last |= {f"disagreement/{arm}": 0.1 for arm, against in ARMS.items() if against}
    evaluations = [{"step": 4, "epoch": 0} | last]
    records.write_table(home / "evaluations.csv", records.columns(records.EVALUATIONS, ARMS), evaluations)
    arm = {"outcome": "finished", "blown_up_at": None, "horizon": 4}
    run = {
        **{"schema": records.SCHEMA, "experiment": name, "digest": digest, "seed": seed},
        **{"outcome": "finished", "command": f"python train.py +experiment={name}"},
        "arms": {name: arm | {"against": against} for name, against in ARMS.items()},
        "dataset": {"name": "shapes", "sha256": "ab", "source": "drawn", "stand_in": True},
        "environment": {"python": "3.11", "versions": {"torch": "2.12"}, "threads": 1},
        "times": {"seconds": 1.5},
        "probes": [],
    }
    records.write_json(home / "run.json", run)


def row(step, seed, bug):
    values = {"step": step, "epoch": 0} | {f"loss/{arm}": 2.0 - 0.1 * step for arm in ARMS}
    for arm in (a for a, against in ARMS.items() if against):
        unit = UNIT[arm.partition(".")[2]]
        drift = 0.3 if bug and arm.startswith("candidate") else unit * (1 + step + seed)
        values |= {f"{kind}/{arm}": drift for kind in KINDS}
    return values


@pytest.fixture
def judge(capsys):
    """Run the script in this process: exit status, what it printed, its lines on stderr."""

    def run(*arguments):
        status = script.main([str(a) for a in arguments])
        said = capsys.readouterr()
        return status, said.out, said.err.splitlines()

    return run


def verdict(folder):
    return json.loads((folder / "verdict.json").read_text())


def change(path, edit):
    stored = json.loads(path.read_text())
    edit(stored)
    path.write_text(json.dumps(stored))


def without_note(page: Path) -> str:
    """A page that was made again, less what it says of its command: that it was not run here."""
    text, note = page.read_text(), f"<p>{AS_RECORDED}</p>\n"
    assert note in text
    return text.replace(note, "")


def test_says_again_what_training_said(judged, judge, tmp_path):
    first = judged("+experiment=control", "dtypes=[float32]", "steps=2")
    (file,) = tmp_path.rglob("verdict.json")
    page = (file.parent / "report.html").read_text()
    for made in (file, file.parent / "report.html"):
        made.unlink()
    status, out, errors = judge(tmp_path)
    assert (status, errors) == (0, [])
    assert verdict(file.parent) == first
    assert without_note(file.parent / "report.html") == page
    (line,) = (line for line in out.splitlines() if line.startswith("control"))
    assert {first["digest"], first["verdict"], first["headline"]} <= set(re.split(r"\s{2,}", line))


def test_answers_a_question_again(judge, tmp_path):
    from experiments import gradient_check
    from suite.command.configuration import composed

    small = ["faults=false", "case.points=4", "curve.points=2", "curve.decades=3", "seed=0..1", "workers=1"]
    small += ["+experiment=gradient_check", "scale=smoke", "logger=none", f"results={tmp_path}"]
    gradient_check.run(composed(*small))
    (folder,) = (tmp_path / "gradient_check").iterdir()
    names = ("verdict.json", "answer.json", "tables/literal.csv", "figures/staircase.svg", "report.html")
    before = {name: (folder / name).read_text() for name in names}
    for name in names:
        (folder / name).unlink()
    assert judge(folder)[0] == 0
    again = {name: (folder / name).read_text() for name in names}
    assert again | {"report.html": without_note(folder / "report.html")} == before
    (folder / "seed=1" / "measurements.json").write_text('{"literal": 3}')
    status, out, _ = judge(folder)
    assert status == 0
    assert "left out" in out
    assert verdict(folder)["seeds"] == [0]


def test_imports_neither_torch_nor_lightning_nor_wandb(make_run):
    code = (
        "import runpy, sys; sys.argv = ['judge.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('scripts/judge.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'lightning', 'wandb', 'torchvision'} & set(sys.modules)))"
    )
    folder = str(make_run())
    for arguments in ([folder], ["--compare", folder, folder]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"


def test_a_folder_above_a_glob_and_several_runs(make_run, judge, tmp_path):
    a, b = make_run("one"), make_run("two", bug=True)
    make_run("three", seeds=())
    for given in ([tmp_path], [f"{tmp_path}/runs/*"], [f"{tmp_path}/**/0123456789"], [a, b, tmp_path]):
        status, out, errors = judge(*given)
        assert (status, errors) == (0, [])
        lines = [line.split() for line in out.splitlines()]
        assert sorted(line[0] for line in lines if line[1] == "0123456789") == ["one", "three", "two"]
    assert verdict(b)["verdict"] == "bug"
    assert "no seed has finished" in out
    assert not (tmp_path / "runs" / "three" / "0123456789" / "verdict.json").exists()


def test_fail_on_lists_the_verdicts(make_run, judge):
    right, wrong = make_run("right"), make_run("wrong", bug=True)
    assert judge(right, "--fail-on", "bug,unstable")[0] == 0
    assert judge(right, wrong, "--fail-on", "bug,unstable")[0] == 3


REFUSED = {
    "nothing to judge": ([], "name the runs to judge"),
    "no such run": (["nowhere"], "nowhere does not exist"),
    "a glob without a match": (["nowhere/*"], "nowhere/* matches no experiment"),
    "a file": ([ROOT / "README.md"], "is a file"),
    "no run in it": ([ROOT / "docs"], "holds no experiment"),
    "a verdict that is none": (["x", "--fail-on", "wrong"], "--fail-on wrong is unknown: choose from"),
    "one to compare": (["--compare", "x"], "expected 2 arguments"),
    "an option that is none": (["x", "--nothing"], "--nothing"),
    "out without compare": (["x", "--out", "y"], "is for --compare"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(judge, arguments, said):
    status, _, errors = judge(*arguments)
    assert status == 2
    assert len(errors) == 1
    assert said in errors[0]


SETTINGS = {
    "an interpolation": ("name: ${oc.env:HOME}", "holds ${oc.env:HOME}, which has no value yet"),
    "code": ("name: !!python/object/apply:os.system [true]", "cannot be read"),
    "an alias": ("name: x\na: &a [1]\nb: [*a, *a]", "holds a YAML alias"),
    "no YAML": ("name: [", "cannot be read"),
    "a list": ("[1, 2]", "is no experiment"),
    "another kind": ("name: x\nkind: os", "kind=os is unknown"),
    "a kind that is a path": ("name: x\nkind: questions.asking", "kind=questions.asking is unknown"),
    "a subject that is none": ("name: x\nsubject: me", "subject=me is unknown"),
}


def test_settings_are_values_alone_and_the_others_are_judged_all_the_same(make_run, judge):
    good, bad = make_run("good"), [make_run(f"bad-{n}") for n in range(len(SETTINGS))]
    for folder, (text, _) in zip(bad, SETTINGS.values(), strict=True):
        (folder / "experiment.yaml").write_text(text)
    status, out, errors = judge(*bad, good)
    assert status == 2
    for folder, (_, said), line in zip(bad, SETTINGS.values(), errors, strict=True):
        assert said in line
        assert str(folder) in line
        assert not (folder / "verdict.json").exists()
    assert "round_off" in out


PROBE = dict.fromkeys(("probe", "question", "reading"), "p")
PROBE |= {"measured": 1.0, "threshold": 1.0, "supports": None, "place": None}
DAMAGE = {
    "an arm without against": lambda run: run["arms"]["candidate.float32"].pop("against"),
    "an arm against nobody": lambda run: run["arms"]["candidate.float32"].update(against="me"),
    "a name that is none": lambda run: run["arms"].update({'"]{': run["arms"]["candidate.float32"]}),
    "no data set": lambda run: run.pop("dataset"),
    "an environment that is a word": lambda run: run.update(environment="here"),
    "a probe without a reading": lambda run: run.update(probes=[{"probe": "function"}]),
    "a verdict that is none": lambda run: run.update(
        probes=[dict.fromkeys(("probe", "question", "reading"), "")]
        and [
            {
                "probe": "p",
                "question": "",
                "measured": 1,
                "threshold": 1,
                "supports": "x",
                "reading": "",
                "place": None,
            }
        ]
    ),
    "a place that is a word": lambda run: run.update(probes=[PROBE | {"place": "here"}]),
    "layers that are numbers": lambda run: run.update(layers=[3]),
    "times that are words": lambda run: run.update(times={"seconds": "long"}),
    "another digest": lambda run: run.update(digest="9876543210"),
    "another seed": lambda run: run.update(seed=7),
}


CURVES = ["step,loss", "step\n1\n1\n", "loss/x\n1.0\n", "step\nnan\n"]


def test_damaged_seeds_are_named_and_left_out(make_run, judge):
    """Each in its own way, the last one excepted."""
    whole = len(DAMAGE) + len(CURVES)
    folder = make_run(seeds=range(whole + 1))
    for seed, damage in enumerate(DAMAGE.values()):
        change(folder / f"seed={seed}" / "run.json", damage)
    for seed, text in enumerate(CURVES, len(DAMAGE)):
        (folder / f"seed={seed}" / "curves.csv").write_text(text)
    status, out, errors = judge(folder)
    assert (status, errors) == (0, [])
    said = "".join(out.split())
    named = re.findall(r"leftoutoftheverdict:.*?\bseed=(\d+)", said)
    assert sorted(map(int, named)) == list(range(whole))
    assert verdict(folder)["seeds"] == [whole]


def test_a_run_without_a_sound_seed_is_refused(make_run, judge):
    folder = make_run(seeds=(0,))
    (folder / "seed=0" / "run.json").write_text("{")
    status, _, errors = judge(folder)
    assert status == 2
    assert "holds no finished seed that can be read" in errors[0]


def test_a_probe_that_measured_infinity_is_judged(make_run, judge):
    folder = make_run()
    probe = {"probe": "function", "question": "?", "measured": "inf", "threshold": 1.0, "supports": "bug"}
    place = {"module": "a", "pass": "forward", "step": 0}
    change(
        folder / "seed=0" / "run.json",
        lambda run: run.update(probes=[probe | {"reading": "far", "place": place}]),
    )
    assert judge(folder)[0] == 0
    assert verdict(folder)["verdict"] == "bug"


def test_seeds_that_have_not_finished_are_counted(make_run, judge):
    folder = make_run()
    (folder / "seed=2").mkdir()
    assert "0..1, 1 unfinished" in judge(folder)[1]


SCRIPT = "<img src=x onerror=alert(1)>"  # no path, which no name may be


def test_names_are_text_on_the_page_and_on_the_terminal(make_run, judge, tmp_path):
    a = make_run("a", hypothesis=SCRIPT)
    for home in (a,):
        settings = yaml.safe_load((home / "experiment.yaml").read_text())
        (home / "experiment.yaml").write_text(yaml.safe_dump(settings | {"name": f"[red]{SCRIPT}\x1b[2J"}))
    b = make_run("b", optimizer={SCRIPT: 1})
    status, out, errors = judge("--compare", a, b, "--out", tmp_path)
    assert (status, errors) == (0, [])
    assert "\x1b[2J" not in out
    assert f"[red]{SCRIPT}" in out
    assert SCRIPT not in (tmp_path / "compare.html").read_text()
    assert judge(a)[0] == 0
    assert SCRIPT not in (a / "report.html").read_text()


@pytest.fixture
def compared(make_run, judge, tmp_path):
    """The page and the text of a right run beside a wrong one, with seeds 0 to 2 and 1 to 3."""

    def run(**changes):
        a = make_run("right", seeds=(0, 1, 2))
        b = make_run("wrong", seeds=(1, 2, 3), bug=True, **changes)
        status, out, errors = judge("--compare", a, b, "--out", tmp_path / "out")
        assert (status, errors) == (0, [])
        return (tmp_path / "out" / "compare.html").read_text(), out

    return run


def test_two_side_by_side_say_verdicts_evidence_and_what_differs(compared):
    page, out = compared(optimizer={"lr": 0.2})
    for text in (page, out):
        assert "Another verdict: A round_off, B bug." in text
        assert "speaks for another verdict" in text
        assert "optimizer.lr" in text
        assert "0.2" in text
    assert "the 2 seeds that both hold" in page
    assert "the 2 seeds of both" in out
    assert "results" not in out.split("settings that differ")[1]


def test_the_page_is_one_file_with_the_drift_of_both(compared):
    page, _ = compared()
    curves = set(re.findall(r'data-arm="([^"]+)"', page))
    arms = ("candidate.float32", "candidate.float64", "control.float32", "control.float64")
    assert curves == {f"{label} {arm}" for label in "AB" for arm in arms}
    namespaces = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r"\w+://[^\"'\s<]+", page)) <= namespaces
    assert not re.search(r"#0[1-9a]0[1-9a]0[1-9a]\b", page)  # every stand-in colour was replaced


def test_an_experiment_beside_itself_differs_in_nothing(make_run, judge):
    a = make_run()
    status, out, _ = judge("--compare", a, a)
    assert status == 0
    assert (a / "compare.html").exists()
    assert "The same verdict: round_off." in out
    assert "≠" not in out
    assert "settings that differ: none" in out
    assert "environment that differs: none" in out


def test_experiments_without_curves_are_compared(make_run, judge):
    a, b = make_run("one"), make_run("two")
    for home in (a / "seed=0", a / "seed=1", b / "seed=0", b / "seed=1"):
        for name in ("curves.csv", "evaluations.csv"):
            (home / name).write_text("step,epoch\n")
        change(home / "run.json", lambda run: run.update(arms={}))
    status, out, errors = judge("--compare", a, b)
    assert (status, errors) == (0, [])
    assert "drift-curves" not in (a / "compare.html").read_text()
    assert "drift:" not in out


def test_an_environment_that_differs_is_shown(make_run, judge):
    a, b = make_run("one"), make_run("two")
    change(b / "seed=1" / "run.json", lambda run: run["environment"]["versions"].update(torch="2.15"))
    out = judge("--compare", a, b)[1]
    (line,) = (line for line in out.splitlines() if line.startswith("versions.torch"))
    assert line.split() == ["versions.torch", "2.12", "2.12", "or", "2.15"]


def test_what_cannot_be_compared_is_one_line(make_run, judge, tmp_path):
    a, b = make_run("one"), make_run("two", seeds=())
    for arguments, said in (
        ((a, tmp_path), "holds 2 experiments: write one of them"),
        ((a, b), "holds no finished seed"),
        ((a, a, "--out", a / "experiment.yaml"), "cannot be written"),
    ):
        status, _, errors = judge("--compare", *arguments)
        assert status == 2
        assert len(errors) == 1
        assert said in errors[0]
