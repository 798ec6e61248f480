import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlab.record.seed_record import (
    SCHEMA,
    OtherVersion,
    RecordError,
    columns,
    finished_seeds,
    read_json,
    read_seed,
    read_table,
    seed_folder,
    write_json,
    write_sealed,
    write_table,
    write_whole,
)

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


ARMS = {"reference.float32": {"blown_up_at": None, "against": None}}


def finished(folder, **more):
    """Seed 3 as a run leaves it."""
    home = seed_folder(folder, 3)
    rows = [{"step": s, "epoch": 0, "loss/reference.float32": 0.1 + 0.7**s} for s in range(5)]
    files = {name: write_table(home / name, columns(("loss",), ARMS), rows) for name in TABLES}
    run = {
        "schema": SCHEMA,
        "seed": 3,
        "arms": ARMS,
        "files": files,
        "times": {"seconds": 0.30000000000000004},
    }
    write_sealed(home / "run.json", run | more)
    return home


TABLES = ("curves.csv", "evaluations.csv")


def test_a_sealed_object_reads_back_without_its_seal(tmp_path):
    value = {"a": [1, 2.5, None, True], "b": {"inf": math.inf, "text": "é\x00"}, "c": -0.0}
    write_sealed(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value | {"b": {"inf": "inf", "text": "é\x00"}}


@pytest.mark.parametrize("name", ["run.json", *TABLES])
def test_any_other_digit_is_noticed(tmp_path, name):
    """Also in the last of seventeen, where it may be another name of the same number."""
    path = finished(tmp_path) / name
    whole = path.read_bytes()
    for at in (i for i, byte in enumerate(whole) if 48 <= byte <= 57):
        for digit in {48, 49, 53, 57} - {whole[at]}:
            path.write_bytes(whole[:at] + bytes([digit]) + whole[at + 1 :])
            with pytest.raises(RecordError, match=f"{name} is damaged"):
                read_seed(tmp_path, 3)
    path.write_bytes(whole)
    assert read_seed(tmp_path, 3).run["times"] == {"seconds": 0.30000000000000004}


def test_what_a_record_rests_on_is_checked_too(tmp_path):
    content = write_sealed(seed_folder(tmp_path, 3) / "measurements.json", {"a": 1})
    home = finished(tmp_path, files={"measurements.json": content})
    assert read_seed(tmp_path, 3) is not None
    write_sealed(home / "measurements.json", {"a": 2})
    with pytest.raises(RecordError, match=r"measurements\.json is damaged"):
        read_seed(tmp_path, 3)
    (home / "measurements.json").unlink()
    with pytest.raises(RecordError, match=r"measurements\.json is missing"):
        read_seed(tmp_path, 3)


def test_records_without_checksums_are_taken_as_they_are(tmp_path):
    home = finished(tmp_path)
    run = {k: v for k, v in json.loads((home / "run.json").read_text()).items() if k not in ("seal", "files")}
    write_json(home / "run.json", run)
    assert read_seed(tmp_path, 3).run == run
    write_json(home / "run.json", run | {"files": {}})
    with pytest.raises(RecordError, match="files and no seal"):
        read_seed(tmp_path, 3)


def test_a_record_of_another_schema_is_of_another_version(tmp_path):
    finished(tmp_path, schema=SCHEMA + 1, environment={"versions": {"driftlab": "9.9"}})
    with pytest.raises(OtherVersion, match=r"run\.json was written by driftlab 9\.9 \(schema 2\)") as error:
        read_seed(tmp_path, 3)
    assert error.value.version == "9.9"
    finished(tmp_path, schema=SCHEMA + 1, environment={"versions": {"driftlab": "../../\x1b[2J"}})
    with pytest.raises(OtherVersion, match="was written by another version of driftlab") as error:
        read_seed(tmp_path, 3)
    assert error.value.version is None


def test_a_seed_without_a_record_has_not_finished(tmp_path):
    assert read_seed(tmp_path, 3) is None


def test_only_numbers_as_they_are_written_name_seeds(tmp_path):
    for name in ("seed=3", "seed=-1", "seed=03", "seed=²", "seed=1.damaged-1", "seed="):
        write_json(tmp_path / name / "run.json", {})
    assert finished_seeds(tmp_path) == [-1, 3]


def test_a_refused_write_names_the_file_and_not_its_temporary_one(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as error:  # noqa: PT011 (which one, the system says)
        write_whole(tmp_path / "file" / "run.json", "text")
    assert error.value.filename == str(tmp_path / "file" / "run.json")
