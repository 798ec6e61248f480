"""The verdicts of real runs: the experiments of this suite, and other people's rewrites."""

import json

import pytest

SHORT = ("steps=24", "float64_steps=8", "model.width=4", "batch_size=32")


def verdict_of(train, tmp_path, *arguments):
    done = train(*arguments, *SHORT)
    assert done.status == 0, done.err + done.out
    (file,) = tmp_path.rglob("verdict.json")
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("split_conv", "round_off"),
        ("split_conv_input", "round_off"),
        ("grouped_conv", "round_off"),
        ("as_grouped", "round_off"),
        ("precision", "round_off"),
        ("control", "round_off"),
        ("planted_bug", "bug"),
    ],
)
def test_the_experiments_say_what_they_expect(train, tmp_path, name, verdict):
    found = verdict_of(train, tmp_path, f"+experiment={name}", "seed=0..1")
    assert found["verdict"] == verdict
    assert found["seeds"] == [0, 1]


@pytest.mark.slow
def test_the_edge_shows_that_training_is_unstable(train, tmp_path):
    found = verdict_of(train, tmp_path, "+experiment=learning_rate_edge", "seed=0..2", "optimizer.lr=60")
    assert found["verdict"] == "unstable"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "verdict", "where"),
    [
        ("identity", "bit_identical", None),
        ("transposed_linear", "round_off", None),
        ("conv_by_matrix", "round_off", None),
        ("frozen_momentum", "bug", {"module": "bn1", "pass": "buffer", "step": 0}),
        ("other_epsilon", "bug", {"module": "bn1", "pass": "forward", "step": 0}),
        ("late", "bug", {"module": None, "pass": "forward", "step": 4}),
        ("reinitialised", "bug", {"module": "fc", "pass": "forward", "step": 0}),
    ],
)
def test_somebody_elses_rewrite(train, tmp_path, target, verdict, where):
    found = verdict_of(
        train, tmp_path, "+experiment=split_conv", f"rewrite.target=tests.experiments.rewrites.{target}"
    )
    assert found["verdict"] == verdict
    assert found["where"] == where
