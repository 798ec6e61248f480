"""Pairs written by people who had not seen the diagnosis: what it learnt from them stays."""

from pathlib import Path

import pytest

from bench import held_back
from bench.run import all_cases, run_case
from bench.summary import read_csv

PUBLISHED = Path(__file__).resolve().parents[2] / "results/published/held_back"
CASES = {case.name: case for case in all_cases(held_back)}


def read(file):
    return {o.name: o for o in read_csv((PUBLISHED / file).read_text())}


def mended():
    """Those whose place was wrong at first sight and is right on the published page."""
    first, now = read("held_out_first.csv"), read("cases.csv")
    return [name for name, o in first.items() if o.placed is False and now[name].placed]


def test_all_of_them_are_published():
    assert read("held_out_first.csv").keys() == read("cases.csv").keys() == CASES.keys()


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", mended())
def test_a_place_that_was_wrong_at_first_sight_is_right(name):
    outcome = run_case(CASES[name])
    assert outcome.right, f"{outcome.label}, and it said {outcome.verdict}: {outcome.headline}"
    assert outcome.placed, f"{CASES[name].modules}, and it said {outcome.where}"
