import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.command.errors import ConfigurationError
from suite.command.seeds import fan_out, format_seeds, parse_seeds


@pytest.mark.parametrize(
    ("value", "seeds"),
    [
        (3, [3]),
        ("3", [3]),
        ("0..2", [0, 1, 2]),
        ("4..4", [4]),
        ([0, 2, 5], [0, 2, 5]),
        (["0..1", 7], [0, 1, 7]),
    ],
)
def test_the_three_forms(value, seeds):
    assert parse_seeds(value) == seeds


NONE = ("9..0", "a..b", "1..", "..3", "1...3", "", "x", "²", "9" * 5000, "0..99999")


@pytest.mark.parametrize("value", [*NONE, -1, 2**32, 1.5, None, True, [], [1, 1], [None], [[0]]])
def test_anything_else_is_one_clear_line(value):
    with pytest.raises(ConfigurationError) as error:
        parse_seeds(value)
    assert "seed" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_backward_range_says_what_to_write():
    with pytest.raises(ConfigurationError, match=r"write seed=0\.\.9"):
        parse_seeds("9..0")


@given(st.integers(0, 50), st.integers(0, 50))
def test_both_ends_are_included(a, b):
    low, high = min(a, b), max(a, b)
    assert parse_seeds(f"{low}..{high}") == list(range(low, high + 1))


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_multirun_sweeps_over_single_seeds(flag):
    assert fan_out([flag, "+experiment=a,b", "seed=0..3"]) == [flag, "+experiment=a,b", "seed=0,1,2,3"]
    assert fan_out([flag, "seed=[0,2,5]"]) == [flag, "seed=0,2,5"]
    assert fan_out([flag, "seed=1,4..5"]) == [flag, "seed=1,4,5"]


def test_multirun_may_be_asked_for_anywhere():
    assert fan_out(["+experiment=a", "-m", "seed=1"]) == ["-m", "+experiment=a", "seed=1"]


def test_multirun_with_workers_gives_a_job_as_many_seeds():
    fanned = fan_out(["-m", "seed=0..4", "workers=2"])
    assert fanned == ["-m", "seed=[0,1],[2,3],4", "workers=2"]
    assert fan_out(["-m", "seed=0..1", "workers=auto"])[1] == "seed=0,1"


@given(st.integers(0, 30), st.integers(1, 9))
def test_multirun_with_workers_loses_no_seed(last, workers):
    (swept,) = [a for a in fan_out(["-m", f"seed=0..{last}", f"workers={workers}"]) if a.startswith("seed=")]
    jobs = re.findall(r"\[[^]]*\]|\d+", swept.removeprefix("seed="))
    seeds = [parse_seeds([int(n) for n in re.findall(r"\d+", job)]) for job in jobs]
    assert [seed for job in seeds for seed in job] == list(range(last + 1))
    assert all(len(job) <= workers for job in seeds)


def test_one_process_keeps_its_seeds_together():
    assert fan_out(["seed=0..3"]) == ["seed=0..3"]


@pytest.mark.parametrize(("seeds", "text"), [([3], "3"), ([0, 1, 2], "0..2"), ([0, 2, 5], "[0,2,5]")])
def test_seeds_are_written_as_they_are_read(seeds, text):
    assert format_seeds(seeds) == text
