"""Settings of the command line that change nothing are said; what a file sets may rest."""

import pytest
import yaml

from tests.suite.command.test_command_line import EXPERIMENTS
from tests.suite.refusing import assert_refused

SAID = {
    "+experiment=control seeds.augmentation=5 augment=false": ["beside augment=false: no image is moved"],
    "+experiment=control seeds={augmentation:5,nudge:4} augment=false": [
        "seeds.augmentation=5 changes nothing"
    ],
    "+experiment=precision roles=[reference] seeds.nudge=3": ["beside roles=[reference]: the control"],
    "+experiment=control dtypes=[float32] float64_steps=2 float64_share=0.3": [
        "float64_steps=2 changes nothing beside dtypes=[float32]: no arm",
        "float64_share=0.3 changes nothing beside dtypes=[float32]: no arm",
    ],
    "+experiment=control float64_steps=100": ["does no more than float64_steps=6, for steps=6: float64 arms"],
    "+experiment=control float64_steps=6 probe_images=16 eval_every=5": [],
    "+experiment=control probe_images=17": [
        "does no more than probe_images=16, for batch_size=16: the probes"
    ],
    "+experiment=control log_schedule={dense:7,per_decade:3}": [
        "log_schedule.dense=7 does no more than log_schedule.dense=6",
        "log_schedule.per_decade=3 changes nothing beside steps=6: each leaves a row",
    ],
    "+experiment=control steps=1 learning_rate_schedule=constant eval_every=1": [
        "eval_every=1 changes nothing beside steps=1",
        "learning_rate_schedule=constant changes nothing beside steps=1",
    ],
    "+experiment=control +optimizer.dampening=0.1 optimizer.momentum=0": ["+optimizer.dampening=0.1 changes"],
    "+experiment=control seed=0..3 seeds={init:1,order:1,augmentation:1,nudge:1}": [
        "seed=0..3 changes nothing beside seeds: all of them are set"
    ],
    "+experiment=control seed=0..3 seeds={init:1,order:1,augmentation:1}": [],
    "+experiment=control local.windows=[2]": ["local.windows=[2] changes nothing beside roles="],
    "+experiment=split_conv local.windows=[] local.updates=2": ["local.updates=2 changes nothing beside"],
    "+experiment=split_conv local.windows=[2] local.share=0.2": ["local.share=0.2 changes nothing beside"],
    "+experiment=split_conv local.windows=[2] local.updates=2": [],
    "+experiment=control rerun=true reprobe=true": ["reprobe=true changes nothing beside rerun=true"],
    "+experiment=control +scale.least_float64_steps=3": ["beside float64_steps=3: none is chosen"],
    "+experiment=control workers=8 seed=0..3": ["workers=8 does no more than workers=4"],
    "+experiment=control workers=4 seed=0..3": [],
    "+experiment=control steps=2 steps=3": ["steps=2 changes nothing: steps=3 stands behind it"],
    "+experiment=control scale.steps=2 batch_size=8": [],
    "+experiment=kinks sizes.full.steps=9": ["sizes.full.steps=9 changes nothing beside scale=smoke"],
    "+experiment=kinks scale.eval_images=3": ["scale.eval_images=3 changes nothing: kinks has no use"],
    "+experiment=edge_of_stability optimizer.lr=0.1": ["optimizer.lr=0.1 changes nothing: edge_of_stability"],
    "+experiment=split_gradient scale.steps=4": ["scale.steps=4 changes nothing: split_gradient trains"],
    "+experiment=one_bit scale.batch_size=8 model.zero_scale=false": [],
    "+experiment=one_bit learning_rate_schedule=constant warmup_steps=6": ["beside warmup_steps=6: none"],
    "+experiment=one_bit progress.points=100": ["is taken as progress.points="],
    "+experiment=one_bit progress.points=2 learning_rate_schedule=constant": [],
    "+experiment=batch_size chunk=4": ["chunk=4 changes nothing beside batch_invariant=false: the costs"],
    "+experiment=batch_size chunk=4 batch_invariant=true": [],
    "+experiment=batch_size case={blocks:3,filters:9}": [
        "case.blocks=3 is taken as case.blocks=2: scale=smoke",
        "case.filters=9 is taken as case.filters=8",
    ],
    "+experiment=batch_size case.blocks=1 case.filters=4 layers.batch=9 suite.rows=2 sweep.few=[3,5]": [],
    "+experiment=batch_size statistics.rows=40 layers.batch=18 cost.repeats=2 suite.steps=1": [
        "statistics.rows=40 is taken as statistics.rows=17",
        "layers.batch=18 is taken as layers.batch=17",
        "cost.repeats=2 is taken as cost.repeats=1",
        "suite.steps=1 is taken as suite.steps=2",
    ],
    "+experiment=batch_size sweep.up_to=40 sweep.above=[50] cost.batches=[2,4]": [
        "sweep.up_to=40 is taken as sweep.up_to=17",
        "sweep.above=[50] is taken as sweep.above=[]",
        "cost.batches=[2,4] is taken as cost.batches=[2]",
    ],
    "+experiment=batch_size scale=full sweep.few=[2,3]": ["sweep.few=[2,3] changes nothing beside scale"],
    "+experiment=gradient_check case.points=50 curve.points=11": [
        "case.points=50 is taken as case.points=10: scale=smoke",
        "curve.points=11 is taken as curve.points=10: the case has no more points",
    ],
    "+experiment=gradient_check scale=small case.points=50": [],
    "+experiment=gradient_check case.options={rows:2,columns:3} case.points=50 curve.points=9": [
        "case.points=50 is taken as case.points=6: the case has no more elements",
        "curve.points=9 is taken as curve.points=6: the case has no more points",
    ],
    "+experiment=gradient_check case.options={rows:2,columns:10} case.points=50": [
        "case.points=50 is taken as case.points=10: scale=smoke",
    ],
    "+experiment=group_semantics net.channels=[8,8,8,8,8]": ["beside scale: thin is judged"],
    "+experiment=group_semantics net.channels=[8,8,8,8,8] training.pair=net": [],
    "+experiment=group_semantics net.classes=3 thin.features=[8,9]": [],
    "+experiment=split_gradient sweep.batch=[1,2,3]": ["is taken as sweep.batch=[1, 3]: a case"],
    "+experiment=split_gradient scale=small sweep.batch=[1,2,3]": [],
    "+experiment=split_gradient scale=small sweep.batch=[1,2,1]": ["is taken as sweep.batch=[1, 2]: a case"],
    "+experiment=split_gradient sweep.batch=[3,3]": ["is taken as sweep.batch=[3]: a case is measured once"],
    "+experiment=split_gradient scale=small sweep.split=[[1,-1],[1,63]]": ["sweep.split=[[1, -1]]: a case"],
}
USED = "data=shapes changes nothing: "  # of the tests' own settings


def said(train, *arguments: str) -> list[str]:
    done = train(*arguments, "--cfg", "job", "--resolve")
    assert (done.status, done.err) == (0, "")
    return [line for line in done.out.splitlines() if line.startswith("# ") and USED not in line]


@pytest.mark.parametrize("command", SAID)
def test_a_setting_that_changes_nothing_is_said(train, command):
    lines = said(train, *command.split())
    assert len(lines) == len(SAID[command])
    for line, expected in zip(lines, SAID[command], strict=True):
        assert expected in line


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_is_said_of_what_a_file_sets(train, name):
    assert not said(train, f"+experiment={name}", "tf32=false")  # which a CPU has not


def test_it_is_said_in_a_run_too(train):
    done = train("+experiment=control", "steps=2", "eval_images=99999", "probe_images=99")
    words = " ".join(done.out.split())
    assert done.status == 0
    assert "probe_images=99 does no more than probe_images=16" in words
    assert "eval_images=99999 does no more than eval_images=2000: the test set holds no more" in words


REFUSED = {
    "scale.steps=7 steps=5": "scale.steps=7 and steps=5 set one thing: leave one of them out",
    "scale.width=8 model.width=4": "scale.width=8 and model.width=4 set one thing",
    "scale.name=full": "write scale=full",
    "fail_on=[bug,bug]": "fail_on=[bug, bug] names one of them twice",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_is_set_in_two_ways_is_refused(train, tmp_path, settings):
    assert_refused(train("+experiment=control", *settings.split()), REFUSED[settings], tmp_path)


def test_what_is_expected_of_ones_own_rewrite_is_kept(train, tmp_path):
    """In place of what the experiment expected of its own."""
    own = [
        "rewrite.target=models.rewrites.split_conv.split_conv",
        "steps=2",
        "expected=bug",
        "hypothesis=mine",
    ]
    done = train("+experiment=split_conv", *own)
    assert done.status == 0, done.err
    (file,) = tmp_path.rglob("experiment.yaml")
    stored = yaml.safe_load(file.read_text())
    assert (stored["expected"], stored["hypothesis"]) == ("bug", "mine")
