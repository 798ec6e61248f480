"""The files of a run: how they are named, written whole or not at all, and read back.

``curves.csv`` holds a row a logged step, ``evaluations.csv`` a row an evaluation, ``run.json`` what
became of the seed. Numbers are printed with ``repr``, the shortest text that reads back to the same
float64; a value that was not measured is an empty cell.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCHEMA = 1
CURVES = ("loss", "weight_distance", "gradient_distance", "logit_distance", "sign_flips", "accuracy")
EVALUATIONS = ("test_accuracy", "disagreement", "eval_logit_distance", "buffer_distance")
COUNTS = ("step", "epoch", "sign_flips")

Row = Mapping[str, float]


class RecordError(ValueError):
    """A stored file that cannot be what driftlab wrote; the message is one line and names the file."""


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new, never a part."""
    data = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Strict JSON: NaN and inf, which JSON has no word for, become null and the strings "inf", "-inf"."""
    write_whole(path, json.dumps(_strict(value), indent=1, allow_nan=False) + "\n")


def _strict(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def read_json(path: Path) -> dict:
    """Raises RecordError where the file is missing, cut off or no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is damaged: it holds no JSON object")
    return value


def columns(kinds: Iterable[str], arms: Iterable[str]) -> list[str]:
    """The columns of a table in their order: step, epoch, then ``<kind>/<arm>``."""
    arms = list(arms)
    return ["step", "epoch", *(f"{kind}/{arm}" for kind in kinds for arm in arms)]


def write_table(path: Path, header: list[str], rows: Iterable[Row]) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    for row in rows:
        table.writerow([_cell(column, row.get(column)) for column in header])
    write_whole(path, text.getvalue())


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column.split("/")[0] in COUNTS and math.isfinite(value):
        return str(int(value))
    return repr(float(value))


def read_table(path: Path) -> list[dict[str, float]]:
    """The rows of a table; empty cells are left out. Raises RecordError where it is damaged."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not text.endswith("\n"):
        raise RecordError(f"{path} is damaged: its last line is cut off")
    header, *lines = list(csv.reader(io.StringIO(text)))
    rows = []
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise RecordError(f"{path} is damaged: line {number} has {len(line)} cells, not {len(header)}")
        try:
            rows.append({c: float(v) for c, v in zip(header, line, strict=True) if v != ""})
        except ValueError as error:
            raise RecordError(f"{path} is damaged: line {number}: {error}") from None
    if [r.get("step", -1) for r in rows] != sorted({r.get("step", -1) for r in rows}):
        raise RecordError(f"{path} is damaged: its steps do not rise")
    return rows


@dataclass(frozen=True)
class SeedRecord:
    """What one seed left: ``curves`` and ``evaluations`` row by row, and its ``run.json``."""

    seed: int
    curves: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    run: dict = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        return list(self.run["arms"])

    def series(self, kind: str, arm: str, *, table: str = "curves") -> dict[int, float]:
        """step -> value of one column, where it was measured."""
        column = f"{kind}/{arm}"
        return {int(r["step"]): r[column] for r in getattr(self, table) if column in r}


def seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed={seed}"


def read_seed(folder: Path, seed: int) -> SeedRecord | None:
    """A finished seed, or None where ``run.json`` is not there yet. Raises RecordError where damaged."""
    home = seed_folder(folder, seed)
    if not (home / "run.json").exists():
        return None
    run = read_json(home / "run.json")
    if run.get("schema") != SCHEMA or not isinstance(run.get("arms"), dict) or run.get("seed") != seed:
        raise RecordError(f"{home / 'run.json'} is not a run of seed {seed} that this version can read")
    return SeedRecord(seed, read_table(home / "curves.csv"), read_table(home / "evaluations.csv"), run)


def finished_seeds(folder: Path) -> list[int]:
    """The seeds under an experiment's folder that have a ``run.json``, ascending."""
    names = (p.parent.name.removeprefix("seed=") for p in folder.glob("seed=*/run.json"))
    return sorted(int(n) for n in names if n.lstrip("-").isdigit())
