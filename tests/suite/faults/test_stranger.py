"""A results folder from a stranger is safe to judge: it executes nothing, nothing hangs, nothing leaks."""

import json
import os
import pickle

import pytest
import yaml

from driftlab.record import seed_record as records
from tests.suite.reading.test_judge import change, make_run  # noqa: F401 (a fixture)

TOO_LONG = 60  # seconds, after which a judge is taken to hang


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def judge(forked):
    def run(*arguments):
        ended = forked.run(*arguments, program="scripts/judge.py", kill_after=TOO_LONG)
        assert ended.status in (0, 2), ended.out
        assert "Traceback" not in ended.out
        return ended

    return run


def nested(depth):
    return '{"schema": 1, "arms": ' + "[" * depth + "]" * depth + "}"


FILES = {
    "a pickle": lambda path, mark: path.write_bytes(pickle.dumps(Touch(mark))),
    "a pipe": lambda path, mark: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path, mark: (path.unlink(), path.symlink_to("/dev/zero")),
    "a terminal": lambda path, mark: (path.unlink(), path.symlink_to("/dev/tty")),
    "a folder": lambda path, mark: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path, mark: (path.unlink(), path.symlink_to("nowhere")),
    "a link to itself": lambda path, mark: (path.unlink(), path.symlink_to(path)),
    "another file of the machine": lambda path, mark: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a terabyte of nothing": lambda path, mark: os.truncate(path, 2**40),
    "100 MB in a line": lambda path, mark: path.write_bytes(b"1" * 10**8),
    "deep brackets": lambda path, mark: path.write_text(nested(100_000)),
    "brackets that parse": lambda path, mark: path.write_text(nested(900)),
    "a number beyond float64": lambda path, mark: path.write_text('{"seed": 1e400}'),
    "NaN": lambda path, mark: path.write_text('{"seed": NaN}'),
    "an endless whole number": lambda path, mark: path.write_text('{"seed": ' + "9" * 5000 + "}"),
    "latin-1": lambda path, mark: path.write_bytes(b'{"seed": "\xe9"}'),
    "control sequences": lambda path, mark: path.write_text("\x1b]0;owned\x07\x1b[2J"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "curves.csv", "evaluations.csv"])
def test_whatever_a_file_is_its_seed_is_left_out_and_the_others_are_judged(make_run, judge, tmp_path, name):  # noqa: F811
    mark = tmp_path / "executed"
    seeds = dict(enumerate(FILES, start=1))
    folder = make_run(seeds=range(len(FILES) + 1))
    for seed, kind in seeds.items():
        FILES[kind](folder / f"seed={seed}" / name, mark)
    ended = judge(folder)
    assert ended.status == 0, ended.out
    assert not mark.exists()
    for seed, kind in seeds.items():
        # of run.json, a link to nowhere is as none at all: the seed has not finished
        if (name, kind) not in (("run.json", "a link to nowhere"), ("run.json", "a link to itself")):
            assert ended.says(f"left out of the verdict: {folder}/seed={seed}/{name} is "), kind
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0]
    assert "root:" not in ended.out, "a line of another file of this machine"
    assert "\x1b]0;" not in ended.out


SETTINGS = {
    "a tag of python": "name: x\nhypothesis: !!python/object/apply:os.mkdir [MARK]",
    "a tag of python in a list": "name: x\nlist: [!!python/name:os.system ]",
    "a target": "name: x\nkind: training\nmodel: {_target_: os.mkdir, name: MARK}",
    "a target of a question": "name: x\nkind: gradient_check\ncase: {target: os.mkdir, options: [MARK]}",
    "a rewrite": "name: x\nrewrite: {target: os.mkdir, options: {path: MARK}}",
    "an environment variable": "name: x\nhypothesis: ${oc.env:HOME}",
    "a kind above": "name: x\nkind: ../../tmp/x",
    "a kind of the library": "name: x\nkind: os",
    "a kind that is no text": "name: x\nkind: [training]",
    "a tag that is wrong": "name: x\nwhole: !!int abc",
    "a date that is none": "name: x\nday: !!timestamp 2001-99-99",
    "an endless number": "name: x\nwhole: " + "9" * 5000,
    "deep": "name: x\ndeep: " + "[" * 300 + "]" * 300,
    "deeper": "name: x\ndeep: " + "[" * 100_000,
    "30,000 values": "name: x\nmany: [" + "1," * 30_000 + "]",
    "30,000 interpolations": "name: x\nhypothesis: '" + "${" * 30_000 + "'",
    "a key that is a list": "name: x\n? [a, b]\n: 1",
    "a name that is a number": "name: 3",
    "a subject that is a list": "name: x\nsubject: [a]",
    "an expectation that is a map": "name: x\nexpected: {a: 1}",
    "nothing": "",
    "bytes": "name: x\nb: !!binary aGVsbG8=",
    "control characters": 'name: "a\\e[2Jb"',
}


@pytest.mark.slow
def test_whatever_the_settings_are_they_are_values_and_the_others_are_judged(make_run, judge, tmp_path):  # noqa: F811
    mark = tmp_path / "executed"
    folders = {kind: make_run(f"experiment-{number}") for number, kind in enumerate(SETTINGS)}
    make_run("sound")
    for kind, folder in folders.items():
        (folder / "experiment.yaml").write_text(SETTINGS[kind].replace("MARK", str(mark)))
    for kind in ("a pipe", "a device", "a terabyte of nothing", "a pickle", "100 MB in a line"):
        folders[kind] = make_run(f"file-{len(folders)}")
        FILES[kind](folders[kind] / "experiment.yaml", mark)
    ended = judge(tmp_path / "runs")
    assert not mark.exists()
    assert os.environ.get("HOME") not in ended.out.replace(str(tmp_path), "")
    assert "round_off" in ended.out
    assert "\x1b[2J" not in ended.out
    judged = {kind for kind, folder in folders.items() if (folder / "verdict.json").exists()}
    assert judged <= {"a target", "a rewrite", "bytes", "control characters"}, judged
    for kind, folder in folders.items():
        assert kind in judged or ended.says(f"error: {folder}"), kind


SCRIPT = '<script>alert("x")</script><img src=x onerror=alert(1)>'
HOSTILE = f"{SCRIPT}\x1b[2J{{{{ 7*7 }}}}"


def with_every_text(value, text):
    """A stored object in which each text that may be any is this one."""
    if isinstance(value, dict):
        fixed = ("digest", "against", "supports")
        return {k: v if k in fixed else with_every_text(v, text) for k, v in value.items()}
    if isinstance(value, list):
        return [with_every_text(v, text) for v in value]
    return text if isinstance(value, str) else value


@pytest.mark.slow
def test_every_text_of_a_record_is_text_on_the_page(make_run, judge):  # noqa: F811
    probe = {
        "probe": "p",
        "question": "q",
        "measured": 3.0,
        "threshold": 1.0,
        "supports": "bug",
        "reading": "r",
    }
    probe |= {"place": {"module": "m", "pass": "forward", "step": 0}}
    layer = {"module": "m", "rewritten": True, "passes": {"forward": {"float32": 1.0}}}
    folder = make_run()
    for seed in (0, 1):
        change(
            folder / f"seed={seed}" / "run.json",
            lambda run: run.update(with_every_text({**run, "probes": [probe], "layers": [layer]}, HOSTILE)),
        )
    settings = yaml.safe_load((folder / "experiment.yaml").read_text())
    hostile = settings | {"hypothesis": HOSTILE, "name": HOSTILE.replace("/", ""), SCRIPT: HOSTILE}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(hostile))
    ended = judge(folder)
    page = (folder / "report.html").read_text() if (folder / "report.html").exists() else ""
    assert page, ended.out
    assert SCRIPT not in page
    assert "<img src=x" not in page
    assert "onerror=alert(1)>" not in page.replace("&gt;", "")
    assert "49" not in page.partition("{{ 7*7 }}")[0][-20:]
    assert "\x1b[2J" not in ended.out


@pytest.mark.slow
def test_links_are_not_written_through(make_run, judge, tmp_path):  # noqa: F811
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = make_run()
    for name in ("verdict.json", "report.html"):
        (folder / name).symlink_to(outside)
    assert judge(folder).status == 0
    assert outside.read_text() == "mine"
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0, 1]


@pytest.mark.slow
def test_names_of_folders_that_are_no_seeds(make_run, judge):  # noqa: F811
    folder = make_run(seeds=(0, 1))
    for name in (
        "seed=01",
        "seed=²",
        "seed=",
        "seed=-0",
        "seed=1e9",
        "seed=1.damaged-1",
        "seed=--1",
        "seed=" + "9" * 200,
    ):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text((folder / "seed=1" / "run.json").read_text())
    (folder / "seed=5").symlink_to("/etc")
    (folder / "seed=6").symlink_to(folder)
    ended = judge(folder)
    assert ended.status == 0, ended.out
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0, 1]


@pytest.mark.slow
def test_files_that_a_record_names_lie_beside_it(make_run, judge, tmp_path):  # noqa: F811
    folder = make_run(seeds=(0, 1))
    os.mkfifo(tmp_path / "pipe")
    run = json.loads((folder / "seed=1" / "run.json").read_text())
    records.write_sealed(folder / "seed=1" / "run.json", run | {"files": {str(tmp_path / "pipe"): "0"}})
    assert judge(folder).says(f"{folder}/seed=1/run.json is damaged: files cannot be read")
