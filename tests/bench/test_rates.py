"""The rates of the bench: as numbers beside each page, made of the cases that lie there too."""

import csv
import io
from pathlib import Path

import pytest

from bench.low_precision import __main__ as low_precision
from bench.low_precision.judged import Judged
from bench.low_precision.judged import rates as low_rates
from bench.rates import FIRST, TODAY, Rate, rates_csv
from bench.real_rates import opening, real_rates
from bench.summary import HEADER, _table, rates, read_csv, table_rows

PUBLISHED = Path(__file__).resolve().parents[2] / "results/published"


def text(name, file):
    return (PUBLISHED / name / file).read_text()


def test_a_rate_as_text_and_as_numbers():
    """The interval as tables of it have it."""
    half = Rate(TODAY, "all cases", "driftlab", "right verdict", 1, 2)
    assert str(half) == "1 of 2 (50.0 %; 1.3 to 98.7)"
    none = Rate(TODAY, "all cases", "driftlab", "right place", 0, 0)
    assert str(none) == "0 of 0"
    first, second = csv.DictReader(io.StringIO(rates_csv([half, none])))
    numbers = {key: float(first[key]) for key in ("count", "n", "value", "low", "high")}
    assert numbers == pytest.approx(
        {"count": 1, "n": 2, "value": 0.5, "low": 0.0126, "high": 0.9874}, abs=1e-4
    )
    assert (second["n"], second["value"], second["low"]) == ("0", "", "")


@pytest.mark.parametrize("name", ["calibration", "held_back", "ported"])
def test_the_published_rates_are_those_of_the_published_cases(name):
    today, first = (read_csv(text(name, file)) for file in ("cases.csv", "held_out_first.csv"))
    assert text(name, "rates.csv") == rates_csv([*rates(today), *rates(first, FIRST)])
    page = text(name, "README.md")
    assert _table(HEADER, table_rows(rates(today))) in page
    assert _table(HEADER, table_rows(rates(first, FIRST))) in page


def test_those_of_the_real_bugs():
    counted = real_rates(text("real_bugs", "cases.csv"), text("real_bugs", "habits.csv"))
    assert text("real_bugs", "rates.csv") == rates_csv(counted)
    assert "\n\n".join(opening(counted)) in text("real_bugs", "README.md")


def test_a_habit_is_right_where_it_clears_a_right_pair_or_catches_a_bug():
    cases = "group,right,placed,right at first sight,placed at first sight\nreal bug,True,True,False,\n"
    habits = "kind,outputs,gradients,two_updates,loss_curves,float64,driftlab\n"
    habits += "right,same,,other,,,same\nwrong,same,other,other,,,other\n"
    found = {(r.when, r.by, r.measure): (r.count, r.n) for r in real_rates(cases, habits) if r.cases == "all"}
    assert found[FIRST, "driftlab", "right verdict"] == (0, 1)
    assert found[TODAY, "driftlab", "right place"] == (1, 1)
    assert found[TODAY, "assert_close of the first output", "right"] == (1, 2)
    assert found[TODAY, "assert_close of the first output", "bugs not caught"] == (1, 1)
    assert found[TODAY, "assert_close of the first gradients", "right pairs not cleared"] == (1, 1)
    assert found[TODAY, "assert_close of the weights after two updates", "right"] == (1, 2)
    assert found[TODAY, "driftlab's verdict", "right"] == (2, 2)


def test_those_in_16_bits_and_their_page():
    found, seen = (
        [Judged.of(row) for row in csv.DictReader(io.StringIO(text("low_precision", file)))]
        for file in ("cases.csv", "held_out_first.csv")
    )
    assert text("low_precision", "rates.csv") == rates_csv([*low_rates(found), *low_rates(seen, FIRST)])
    assert text("low_precision", "README.md") == low_precision.page(found, seen)
