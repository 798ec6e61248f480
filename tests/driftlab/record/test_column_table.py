"""Stored tables, kept by column: they read as the rows that were written."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.record.column_table import ColumnTable, columns_of, series_of
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.evidence import same_bits

HEADER = ["step", "loss/reference.float32", "logit_distance/candidate.float32"]
cells = st.one_of(st.just(""), st.floats(allow_nan=False).map(repr))
lines = st.lists(st.tuples(cells, cells), max_size=8).map(
    lambda found: [[str(step), *line] for step, line in enumerate(found)]
)


def as_rows(lines):
    return [{c: float(v) for c, v in zip(HEADER, line, strict=True) if v} for line in lines]


@given(lines)
def test_rows_are_those_that_were_written(written):
    table, rows = ColumnTable(HEADER, written), as_rows(written)
    assert table == rows
    assert list(reversed(table)) == rows[::-1]
    assert [table[i] for i in range(-len(rows), len(rows))] == rows + rows
    assert table[1:3] == rows[1:3]
    assert len(table) == len(rows)


@given(lines)
def test_columns_and_series_are_those_of_the_rows(written):
    table, rows = ColumnTable(HEADER, written), as_rows(written)
    assert {c: list(v) for c, v in columns_of(table)} == dict(columns_of(rows))
    for column in (*HEADER, "loss/nobody.float32"):
        assert series_of(table, column) == series_of(rows, column)
        assert table.column(column, missing=-1) == [row.get(column, -1) for row in rows]


def test_a_row_beyond_the_end_is_an_index_error():
    with pytest.raises(IndexError):
        ColumnTable(HEADER, [["0", "1.5", ""]])[1]


def test_what_is_no_number_is_named_by_its_line_alone():
    with pytest.raises(ValueError, match="line 3 holds what is no number") as error:
        ColumnTable(HEADER, [["0", "1.5", ""], ["1", "s3cret", "2.5"]])
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("distances", "measured"),
    [(["0.0", "0.0"], 0.0), (["nan", "1.0"], math.nan), (["1.0", "nan"], 1.0), (["", "2.0"], 2.0)],
)
def test_evidence_is_the_same_from_rows_and_from_columns(distances, measured):
    written = [[str(step), "1.0", distance] for step, distance in enumerate(distances)]
    stored = SeedRecord(0, ColumnTable(HEADER, written), [], {"arms": {}})
    for record in (stored, replace(stored, curves=as_rows(written))):
        found = same_bits([record], "candidate").measured
        assert found == measured or (math.isnan(found) and math.isnan(measured))
