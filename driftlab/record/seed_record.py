"""The files of a run: tables of numbers, what became of a seed, and which seeds have finished.

``curves.csv`` holds a row a logged step, ``evaluations.csv`` a row an evaluation, ``run.json`` what
became of the seed. Numbers are printed with ``repr``, the shortest text that reads back to the same
float64; a value that was not measured is an empty cell. ``run.json`` is written last: a seed that has it has
finished. Its ``files`` hold the SHA-256 of the files it rests on; a record without them is taken as it is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from driftlab.measures import Moment, every_measure, measures_at
from driftlab.measures.measure import Scale
from driftlab.record.column_table import ColumnTable, Row, series_of
from driftlab.record.files import MissingFile as MissingFile
from driftlab.record.files import OtherVersion as OtherVersion
from driftlab.record.files import RecordError as RecordError
from driftlab.record.files import Unreadable as Unreadable
from driftlab.record.files import as_version, read_whole, version
from driftlab.record.files import write_whole as write_whole
from driftlab.record.json_files import SEAL, parse_json, seal, unsealed
from driftlab.record.json_files import read_json as read_json
from driftlab.record.json_files import write_json as write_json
from driftlab.record.json_files import write_sealed as write_sealed
from driftlab.words import Finding, standing

SCHEMA = 1
CURVES, EVALUATIONS = (tuple(m.name for m in measures_at(moment)) for moment in Moment)
COUNTS = ("step", "epoch", "updates", *(m.name for m in every_measure() if m.scale is Scale.COUNT))
LOCAL = "local.csv"
LARGEST_STEP = 2.0**53  # above, float64 skips whole numbers


def columns(kinds: Iterable[str], arms: Iterable[str]) -> list[str]:
    """The columns of a table in their order: step, epoch, then ``<kind>/<arm>``, of the arms that have it."""
    arms = list(arms)
    of = {m.name: f".{m.dtype}" for m in every_measure() if m.dtype}
    had = (f"{kind}/{arm}" for kind in kinds for arm in arms if arm.endswith(of.get(kind, "")))
    return ["step", "epoch", *had]


def local_columns(arms: Iterable[str]) -> list[str]:
    """Those of ``local.csv``: behind step and epoch the updates since a window began."""
    step, epoch, *kinds = columns((*CURVES, *EVALUATIONS), arms)
    return [step, epoch, "updates", *kinds]


def write_table(path: Path, header: list[str], rows: Iterable[Row]) -> str:
    """Returns the SHA-256 of the file."""
    return write_whole(path, table_text(header, rows))


def table_text(header: list[str], rows: Iterable[Row]) -> str:
    """A table as it stands in its file."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    for row in rows:
        table.writerow([_cell(column, row.get(column)) for column in header])
    return text.getvalue()


def table_sha256(header: list[str], rows: Iterable[Row]) -> str:
    """What ``write_table`` would return."""
    return hashlib.sha256(table_text(header, rows).encode()).hexdigest()


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column.split("/")[0] in COUNTS and math.isfinite(value):
        return str(int(value))
    return repr(float(value))


def read_table(path: Path, sha256: str | None = None) -> ColumnTable:
    """The rows of a table; empty cells are left out. Raises RecordError where it is damaged.

    Args:
        sha256: what the file's has to be, where that is known.
    """
    data = read_whole(path)
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise RecordError(f"{path} is damaged: its SHA-256 is not what run.json says")
    try:
        text = data.decode()
        header, *lines = list(csv.reader(io.StringIO(text))) or [[]]
    except (UnicodeDecodeError, csv.Error):
        raise RecordError(f"{path} is damaged: it is no table") from None
    if not text.endswith("\n"):
        raise RecordError(f"{path} is damaged: its last line is cut off")
    rows = _by_column(path, header, lines)
    steps = rows.column("step", missing=math.nan)
    for number, step in enumerate(steps, start=2):
        if not (0 <= step <= LARGEST_STEP and step == int(step)):
            raise RecordError(f"{path} is damaged: line {number} has no step")
    if any(b <= a for a, b in pairwise(steps)):
        raise RecordError(f"{path} is damaged: its steps do not rise")
    return rows


def read_local(path: Path, sha256: str | None = None) -> ColumnTable:
    """As ``read_table``, of local windows: each row says how many updates ago its window began."""
    rows = read_table(path, sha256)
    behind = zip(rows.column("step", missing=math.nan), rows.column("updates", missing=math.nan), strict=True)
    for number, (step, updates) in enumerate(behind, start=2):
        if not (0 <= updates <= step and updates == int(updates)):
            raise RecordError(f"{path} is damaged: line {number} belongs to no window")
    return rows


def _by_column(path: Path, header: list[str], lines: list[list[str]]) -> ColumnTable:
    # no cell is quoted: where a link leads elsewhere, it may be of another file
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise RecordError(f"{path} is damaged: line {number} has {len(line)} cells, not {len(header)}")
    try:
        return ColumnTable(header, lines)
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from None


@dataclass(frozen=True)
class SeedRecord:
    """What one seed left: ``curves`` and ``evaluations`` row by row, and its ``run.json``.

    Attributes:
        local: the rows of its local windows (``driftlab.lockstep.local``), where it has any.
        findings: what was found in this process; None of a stored seed, whose are in its ``run.json``.
    """

    seed: int
    curves: Sequence[Row]
    evaluations: Sequence[Row]
    run: dict = field(default_factory=dict)
    findings: Sequence[Finding] | None = None
    local: Sequence[Row] = ()

    def found(self) -> list[Finding]:
        """What the probes found, less what later findings took the place of."""
        if self.findings is not None:
            return standing(self.findings)
        return standing(map(Finding.from_dict, self.run.get("probes") or ()))

    @property
    def arms(self) -> list[str]:
        return list(self.run["arms"])

    def series(self, kind: str, arm: str, *, table: str = "curves") -> dict[int, float]:
        """step -> value of one column, where it was measured."""
        return series_of(getattr(self, table), f"{kind}/{arm}")


def seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed={seed}"


def read_seed(folder: Path, seed: int) -> SeedRecord | None:
    """A finished seed, or None where ``run.json`` is not there yet.

    Raises:
        OtherVersion: it was finished by a version of driftlab whose records this one cannot read.
        Unreadable: the disk or its rights do not let it be read.
        RecordError: it is damaged.
    """
    home = seed_folder(folder, seed)
    path = home / "run.json"
    try:
        run = _this_schema(path, *parse_json(path))
    except MissingFile:
        return None
    if not isinstance(run.get("arms"), dict) or run.get("seed") != seed:
        raise RecordError(f"{path} is damaged: it is no record of seed {seed}")
    files = _files(path, run)
    tables = (read_table(home / name, files.pop(name, None)) for name in ("curves.csv", "evaluations.csv"))
    local = read_local(home / LOCAL, files.pop(LOCAL)) if LOCAL in files else ()
    record = SeedRecord(seed, *tables, run, local=local)
    for name, sha256 in files.items():
        if hashlib.sha256(read_whole(home / name)).hexdigest() != sha256:
            raise RecordError(f"{home / name} is damaged: its SHA-256 is not what run.json says")
    return record


def _this_schema(path: Path, run: dict, exact: bool) -> dict:
    """``run`` without its seal, where it is of this schema: a schema that is only damaged is told apart."""
    schema = run.get("schema")
    if schema == SCHEMA or not isinstance(schema, int):
        if "files" in run and SEAL not in run:
            raise RecordError(f"{path} is damaged: it has files and no {SEAL}")
        run = unsealed(path, run, exact)
    elif run.get(SEAL) == seal({k: v for k, v in run.items() if k != SEAL} | {"schema": SCHEMA}):
        schema = None
    else:
        theirs = _version_of(run)
        by = f"driftlab {theirs}" if theirs else "another version of driftlab"
        raise OtherVersion(
            f"{path} was written by {by} (schema {schema}), which driftlab {version()} cannot read", theirs
        )
    if schema != SCHEMA:
        raise RecordError(f"{path} is damaged: it does not say schema {SCHEMA}")
    return run


def _version_of(run: Mapping) -> str | None:
    found: object = run
    for key in ("environment", "versions", "driftlab"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return as_version(found)


def _files(path: Path, run: Mapping) -> dict[str, str]:
    files = run.get("files", {})
    if not isinstance(files, Mapping) or any(Path(name).name != name for name in files):
        raise RecordError(f"{path} is damaged: files cannot be read")
    return dict(files)


def finished_seeds(folder: Path) -> list[int]:
    """The seeds under an experiment's folder that have a ``run.json``, ascending."""
    names = (p.parent.name.removeprefix("seed=") for p in folder.glob("seed=*/run.json"))
    # as seed_folder writes them: seed=01 is none
    return sorted(int(n) for n in names if re.fullmatch(r"0|-?[1-9]\d*", n, re.ASCII))
