"""A sweep whose nodes differ: what differs is said, by seeds, and no more of it than matters."""

import pytest

from driftlab.record.differing import differences, elsewhere, lines, notice, seeds_text

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100"


def environment(**changes):
    found = {
        "python": "3.11.7",
        "platform": "Linux x86_64",
        "versions": {"torch": "2.12.0", "wandb": "0.31.0"},
        "device": A100,
        "threads": 1,
        "deterministic": True,
        "tf32": {"matmul": False, "cudnn": False},
    }
    return found | changes


def runs(*environments):
    return {seed: {"environment": found} for seed, found in enumerate(environments)}


def test_the_same_environment_is_not_mentioned():
    same = runs(environment(), environment())
    assert notice(same) is None
    assert lines(same) == []


def test_seeds_are_grouped_by_value():
    found = differences({s: environment(device=A100 if s < 5 else H100) for s in range(10)})
    assert [str(d) for d in found] == [f"device: {A100} for seeds 0..4; {H100} for seeds 5..9"]
    values = [{"value": A100, "seeds": [0, 1, 2, 3, 4]}, {"value": H100, "seeds": [5, 6, 7, 8, 9]}]
    assert found[0].as_dict() == {"key": "device", "changes_sums": True, "values": values}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tf32": {"matmul": True, "cudnn": False}}, "tf32.matmul: off for seed 0; on for seed 1"),
        ({"versions": {"torch": "2.13.0", "wandb": "0.31.0"}}, "versions.torch: 2.12.0 for seed 0; 2.13.0"),
        ({"deterministic": False}, "deterministic: on for seed 0; off for seed 1"),
        ({"device": "cpu (x, AVX2)"}, f"device: {A100} for seed 0; cpu (x, AVX2) for seed 1"),
    ],
)
def test_what_changes_sums_is_loud(changes, said):
    found = notice(runs(environment(), environment(**changes)))
    assert len(found.loud) == 1
    assert said in found.loud[0]
    assert found.quiet == []


@pytest.mark.parametrize(
    "changes", [{"python": "3.11.9"}, {"versions": {"torch": "2.12.0", "wandb": "0.32.0"}}, {"threads": 4}]
)
def test_what_does_not_change_sums_is_quiet(changes):
    """The threads of a processor do not enter into what a GPU sums."""
    found = notice(runs(environment(), environment(**changes)))
    assert found.loud == []
    assert len(found.quiet) == 1
    assert len(lines(runs(environment(), environment(**changes)))) == 1


def test_what_an_earlier_driftlab_did_not_record_is_no_difference():
    newer = environment(attention="math", fp32_precision={"cuda.conv": "ieee"})
    assert notice(runs(environment(), newer)) is None
    assert not elsewhere(environment(), newer)
    assert elsewhere(environment(), newer | {"device": H100})
    found = notice(runs(environment(), newer, newer | {"attention": "math, flash"}))
    assert found.loud == [
        "attention: not recorded for seed 0; math for seed 1; math, flash for seed 2",
    ]


def test_threads_change_the_sums_of_a_processor():
    found = notice(runs(environment(device="cpu (x)"), environment(device="cpu (x)", threads=2)))
    assert found.loud == ["threads: 1 for seed 0; 2 for seed 1"]


def test_a_seed_that_moved_is_named_though_all_ended_alike():
    moved = {"environment": environment(device=H100), "resumed": [{"step": 40, "environment": environment()}]}
    found = notice({0: {"environment": environment(device=H100)}, 3: moved})
    assert found.loud == [f"resumed elsewhere: device: {A100}, then {H100} for seed 3"]
    assert "resumed" in found.heading
    assert lines({3: moved})[0] == found.heading


@pytest.mark.parametrize("resumed", [None, [], "often", [None], [{"step": 3}], [{"environment": 7}]])
def test_a_record_of_others_may_hold_no_parts_nor_an_environment(resumed):
    assert notice({0: {"resumed": resumed}, 1: {"environment": None}}) is None


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ([3], "seed 3"),
        ([3, 4], "seeds 3, 4"),
        ([0, 1, 2, 7], "seeds 0..2, 7"),
        (list(range(0, 2000, 2)), "seeds 0, 2, 4, 6, 8, 10, … (1,000 seeds)"),
    ],
)
def test_seeds_are_written_as_ranges_and_a_line_stays_short(seeds, text):
    assert seeds_text(seeds) == text


def test_many_values_make_one_line_that_counts_all_seeds():
    (found,) = differences({s: environment(device=f"GPU {s % 30}") for s in range(3000)})
    assert "24 other values for 2,400 seeds" in str(found)
    assert len(str(found)) < 500
