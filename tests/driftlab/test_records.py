import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.records import RecordError, columns, read_json, read_table, write_json, write_table, write_whole

HEADER = columns(("loss", "sign_flips"), ("reference.float32", "candidate.float32"))
numbers = st.floats(allow_nan=False, width=64)


@given(st.lists(st.tuples(numbers, st.integers(0, 2**40)), min_size=1, max_size=5))
def test_floats_read_back_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("t") / "curves.csv"
    rows = [
        {"step": s, "epoch": 0, "loss/reference.float32": x, "sign_flips/candidate.float32": float(n)}
        for s, (x, n) in enumerate(values)
    ]
    write_table(path, HEADER, rows)
    assert read_table(path) == rows


def test_columns_are_those_of_the_contract():
    assert HEADER == [
        "step",
        "epoch",
        "loss/reference.float32",
        "loss/candidate.float32",
        "sign_flips/reference.float32",
        "sign_flips/candidate.float32",
    ]


def test_nan_and_inf_survive_and_missing_cells_are_missing(tmp_path):
    path = tmp_path / "curves.csv"
    write_table(
        path, HEADER, [{"step": 0, "loss/reference.float32": math.nan, "loss/candidate.float32": math.inf}]
    )
    (row,) = read_table(path)
    assert math.isnan(row["loss/reference.float32"])
    assert row["loss/candidate.float32"] == math.inf
    assert "sign_flips/reference.float32" not in row


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[:-4], "last line is cut off"),
        (lambda t: "", "last line is cut off"),
        (lambda t: t.replace("2.5", "2.x5"), "line 3"),
        (lambda t: t + "9\n", "line 4 has 1 cells"),
        (lambda t: t + t.splitlines()[1] + "\n", "steps do not rise"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, damage, message):
    path = tmp_path / "curves.csv"
    write_table(path, HEADER, [{"step": s, "epoch": 0, "loss/reference.float32": 1.5 + s} for s in range(2)])
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=message) as error:
        read_table(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "a.json", {"x": math.nan, "y": -math.inf, "z": (1, 2)})
    assert read_json(tmp_path / "a.json") == {"x": None, "y": "-inf", "z": [1, 2]}


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1]", "\x00\xff"])
def test_damaged_json_is_named(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("latin1"))
    with pytest.raises(RecordError, match=r"run\.json is damaged"):
        read_json(tmp_path / "run.json")


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "old")
    with pytest.raises(TypeError):
        write_whole(path, 3)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
