"""What is refused before Hydra reads it, or explained where Hydra refuses: one line, and what to write."""

import json

import pytest

from tests.suite.refusing import assert_refused

REFUSED = {
    "hydra.job.chdir=maybe": "hydra.job.chdir=maybe cannot be used: write true or false",
    "hydra.job.num=x": "write a whole number",
    "hypothesis=${nope}": "${nope} names no setting",
    "steps=${batchsize}": "steps: ${batchsize} names no setting: did you mean batch_size?",
    "steps": "steps has no value: a setting is written steps=VALUE",
    "roles.x=1": "write it as a whole, NAME=[A,B]",
    "dtypes.9=float32": "the list is shorter: write it as a whole",
    "--config-name foo": "leave --config-name and --config-path out, and write +experiment=NAME",
    "~seeds.foo": "leave it out; --cfg job shows",
    "+model=resnet18": "write it without the plus sign",
    "+roles.x=1": "write it as a whole, NAME=[A,B]",
    "+x@y=1": "leave out what stands from @ on, and write NAME=VALUE",
    "~~x=": "cannot be read: no viable alternative at input '~': write NAME=VALUE, in quotes",
    "hydra.searchpath=[x]": "write --config-dir FOLDER",
    "--cfg all --package foo": "--package foo: there are no such settings",
    "=3": "'=3' names no setting: a setting is written NAME=VALUE",
    "steps=1,2": "steps=1,2 holds several values: write -m for a job each",
    "scale.stepz=8": "scale.stepz is no size: did you mean steps?",
    "scale=auto scale.steps=8": "write steps=VALUE, or scale=small beside it",
    "kind=batch_size": "kind=batch_size: control is of kind training: write +experiment=batch_size",
    "+experiment=precision": "write one experiment, or -m +experiment=control,precision",
    "data.root=/nowhere": "data=shapes makes no use of root: leave it out, or write data=folder",
    "logger.foo=1": "there are logger.alerts, logger.entity, logger.patience, logger.project, "
    "each beside the logger that has it",
    "launcher=joblib": "launcher=joblib is no setting: write hydra/launcher=joblib",
    "hydra/launcher=joblib": "hydra/launcher=joblib counts in a sweep: write -m before it",
    "hydra.launcher.timeout_min=3": "counts in a sweep: write -m",
    "hydra.sweep.dir=x": "counts in a sweep: write -m",
    "-m hydra.run.dir=x": "counts without -m: write hydra.sweep.dir=FOLDER",
    "hydra.mode=MULTIRUN": "write -m",
    "+hydra.foo=3": "is no setting of Hydra's",
    "hydra.run.dir=${oc.env:HOME}/x": "reads the surroundings of a run",
    "-m hydra.sweep.dir=${oc.env:HOME}/x": "reads the surroundings of a run",
    "-m hydra.job.env_copy=[HOME]": "export it where the jobs begin",
    "--info=foo": "--info foo: --info is followed by all or config",
    "--info foo": "--info foo: --info is followed by all or config",
    "--experimental-rerun /no/file": "--experimental-rerun is no option",
    "--multirun=true": "--multirun takes no value",
    "hydra=3": "write hydra.NAME=VALUE",
    "hydra.run.dir=/proc/x": "/proc/x cannot be made",
    "-m hydra.sweep.subdir=/proc/x": "/proc/x cannot be made",
    "-m name=glob(*)": "the sweep holds no job",
    "results=/dev/null": "cannot be written",
    "--resolve": "write --cfg job beside it",
    "--package model": "write --cfg job beside it",
    "--config-dir /no/such": "there is no such folder",
    "--shell-completion": "write install=bash behind it",
    "--shell-completion query=bash": "is what the shell asks",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_refusal_says_what_to_write(train, tmp_path, arguments):
    assert_refused(train("+experiment=control", *arguments.split()), REFUSED[arguments], tmp_path)


@pytest.mark.parametrize("names", ["[control,precision]", "control,precision"])
def test_several_experiments_are_a_sweep(train, names):
    assert_refused(train(f"+experiment={names}"), "-m +experiment=control,precision")


def test_an_option_may_stand_between_settings(train, tmp_path):
    done = train("+experiment=control", "--run", "steps=2")
    assert done.status == 0, done.err
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["experiment"] == "control"


SHOWN = [
    "--info",
    "--info config",
    "-i all",
    "--cfg hydra",
    "-c job -p optimizer",
    "--hydra-help",
    "--version",
]
SHOWN += ["--shell-completion install=bash", "hydra/launcher=joblib --cfg hydra"]


@pytest.mark.parametrize("options", SHOWN)
def test_what_is_shown_leaves_nothing(train, tmp_path, options):
    done = train("+experiment=control", *options.split())
    assert (done.status, done.err) == (0, "")
    assert done.out
    assert not list(tmp_path.iterdir())
