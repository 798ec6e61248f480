"""The verdicts of real runs: the experiments of this suite, and other people's rewrites."""

import pytest

from tests.suite.programs import ONE_BLOCK

SHORT = ("steps=10", "float64_steps=8", "model.width=4", "batch_size=8", "eval_images=100")


@pytest.mark.slow
@pytest.mark.drawn(2)
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
def test_the_experiments_say_what_they_expect(judged, name, verdict):
    found = judged(f"+experiment={name}", "seed=0..1", *SHORT)
    assert found["verdict"] == verdict
    assert found["seeds"] == [0, 1]


@pytest.mark.slow
def test_the_edge_shows_that_training_is_unstable(judged):
    assert (
        judged("+experiment=learning_rate_edge", "seed=0..2", "optimizer.lr=60", *SHORT)["verdict"]
        == "unstable"
    )


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("target", "verdict", "where"),
    [
        ("identity", "bit_identical", None),
        ("transposed_linear", "round_off", None),
        ("conv_by_matrix", "round_off", None),
        ("frozen_momentum", "bug", {"module": "bn1", "pass": "buffer", "step": 0}),
        ("norm_that_stays_in_eval", "bug", {"module": "bn1", "pass": "forward", "step": 0}),
        ("other_epsilon", "bug", {"module": "bn1", "pass": "forward", "step": 0}),
        ("late", "bug", {"module": "fc", "pass": "forward", "step": 4}),
        ("in_bfloat16", "reduced_precision", {"module": "layer1.0.conv1", "pass": "forward", "step": 0}),
        ("wrong_in_float32_alone", "bug", {"module": "layer1.0.conv1", "pass": "forward", "step": 0}),
        ("always_in_float32", "round_off", None),
        ("without_float64", "bit_identical", None),
        ("noisy", "nondeterministic", {"module": "layer1.0.conv1", "pass": "forward", "step": 0}),
        ("reinitialised", "bug", {"module": "fc", "pass": "forward", "step": 0}),
    ],
)
def test_somebody_elses_rewrite(judged, target, verdict, where):
    mine = f"rewrite.target=tests.suite.rewrites.{target}"
    found = judged("+experiment=split_conv", mine, ONE_BLOCK, *SHORT)
    assert found["verdict"] == verdict
    if where is not None:
        assert found["where"].pop("told_by", "its calls") == "its calls"  # both go by the same names
    assert found["where"] == (where and where | {"candidate_module": where["module"]})
