"""Every number of a table in a column of its own."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.report.cells import numbers_apart

PUBLISHED = Path(__file__).resolve().parents[3] / "results" / "published"
TABLES = sorted(p for p in PUBLISHED.glob("*/tables/*.csv") if ".numbers." not in p.name)


def apart(*column):
    """Heading -> numbers, of a table of one column and a plain one beside it."""
    text = io.StringIO()
    csv.writer(text).writerows([("drift", "n of runs"), *((cell, "3") for cell in column)])
    found = numbers_apart(text.getvalue())
    return list(csv.DictReader(io.StringIO(found))) if found else None


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [
        ("1.76 (1.08 to 2.19)", {"value": "1.76", "low": "1.08", "high": "2.19"}),
        ("-2.2 (-6.7 to +2.9)", {"value": "-2.2", "low": "-6.7", "high": "2.9"}),
        ("2^-3 (2^-4 to 2^-2)", {"value": "0.125", "low": "0.0625", "high": "0.25"}),
        ("7 of 20", {"value": "7", "n": "20"}),
        ("7 of 20 (15 % to 59 %)", {"count": "7", "value": "0.35", "low": "0.15", "high": "0.59", "n": "20"}),
        ("146 of 1,000", {"value": "146", "n": "1000"}),
        ("2 to 513", {"low": "2", "high": "513"}),
        ("2 / 3 / 5", {"first": "2", "second": "3", "third": "5"}),
        ("0 / 17 (p = 0.00024)", {"first": "0", "second": "17", "p": "0.00024"}),
        ("round_off (9 of 10)", {"text": "round_off", "value": "9", "n": "10"}),
    ],
)
def test_a_cell_of_several_numbers(cell, numbers):
    (row,) = apart(cell)
    assert row == {f"drift: {name}": number for name, number in numbers.items()} | {"n of runs": "3"}


def test_a_cell_of_another_form_stays_under_its_heading():
    first, second, third = apart("7 of 20", "none", "")
    assert (first["drift"], first["drift: value"], first["drift: n"]) == ("", "7", "20")
    assert (second["drift"], second["drift: value"]) == ("none", "")
    assert third["drift"] == third["drift: value"] == ""


def test_a_table_of_numbers_and_words_alone_is_left():
    assert apart("1.5", "2e-07", "") is None
    assert apart("float32", "float64") is None
    assert apart("2", "depthwise", "") is None


def test_a_column_of_words_and_single_numbers_stays_one():
    table = "groups,equal\n2,7 of 20\ndepthwise,3 of 4\n"
    assert numbers_apart(table) == "groups,equal: value,equal: n\n2,7,20\ndepthwise,3,4\n"


@given(st.lists(st.one_of(st.text(), st.floats(allow_nan=False).map(repr)), min_size=1))
def test_no_cell_is_lost(cells):
    text = io.StringIO()
    csv.writer(text).writerows([("a", "b"), *((cell, "7 of 20") for cell in cells)])
    if "\0" in text.getvalue() or "\r" in text.getvalue().replace("\r\n", ""):
        return  # no text of a CSV file
    rows = list(csv.DictReader(io.StringIO(numbers_apart(text.getvalue()))))
    assert len(rows) == len(list(csv.reader(io.StringIO(text.getvalue())))) - 1
    assert all(row["b: value"] == "7" and row["b: n"] == "20" for row in rows)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_what_is_published_beside_a_table_is_made_of_it(path):
    made, beside = numbers_apart(path.read_text()), path.with_suffix(".numbers.csv")
    of_a_training = path.stem == "arms" and path.parent.parent.name != "growth"
    if of_a_training:  # made of the seeds, see tests/suite/reading/test_publishing_curves.py
        assert made is None
        return
    assert made == (beside.read_text() if beside.exists() else None)
