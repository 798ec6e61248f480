"""Pairs in 16 bits by people who had not seen the diagnosis: what it says of them is what is published."""

import csv
from pathlib import Path

import pytest

from bench.low_precision.case import LABELS, PRECISIONS, cases
from bench.low_precision.judged import judged

PUBLISHED = Path(__file__).resolve().parents[2] / "results/published/low_precision"
CASES = {case.name: case for case in cases()}


def read(file):
    return {row["name"]: row for row in csv.DictReader((PUBLISHED / file).read_text().splitlines())}


def test_all_of_them_are_published_and_half_were_held_out():
    held_out = {name for name, case in CASES.items() if case.held_out}
    assert read("cases.csv").keys() == CASES.keys()
    assert read("held_out_first.csv").keys() == held_out
    assert len(CASES) >= 100
    assert 2 * len(held_out) >= len(CASES)


def test_they_cover_every_precision_and_label():
    assert {case.precision for case in CASES.values()} == {*PRECISIONS}
    assert {case.label for case in CASES.values()} == {*LABELS}


@pytest.mark.drawn(16)
@pytest.mark.parametrize("name", [n for n, row in read("cases.csv").items() if row["right"] == "True"])
def test_what_is_said_is_right(name):
    found = judged(CASES[name])
    assert found.right, f"{found.label}, and it said {found.said} {found.measured}"
