"""The page of several candidates against one reference: their verdicts and their drift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from driftlab.record.seed_record import write_whole
from driftlab.report import tables
from driftlab.report.compare_tables import Side
from driftlab.report.page import template
from driftlab.report.sections import MISSING

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of one letter each, which the page has room for


def write_beside(path: Path, sides: Sequence[Side], reports: Sequence[str]) -> Path:
    """Write ``path``.

    Args:
        sides: an experiment each, of one reference and the same seeds, labelled as ``LABELS`` has it.
        reports: the page of each, as a link from ``path``.
    """
    # here, because matplotlib takes most of a second, and who imports driftlab.report may not write a page
    from driftlab.report.figures import drift_beside

    rows = [_row(side, report) for side, report in zip(sides, reports, strict=True)]
    page = template("beside.html.j2").render(
        sides=sides,
        rows=rows,
        dtypes=list(dict.fromkeys(dtype for row in rows for dtype in row["drift"])),
        missing=MISSING,
        control=_drift(sides[0], "control"),
        drawing=drift_beside(sides),
        stand_in=sides[0].dataset.get("stand_in"),
    )
    write_whole(path, page)
    return path


def _row(side: Side, report: str) -> dict:
    """A side with its link and how far its candidate got from the reference."""
    return {"side": side, "report": report, "drift": _drift(side, "candidate")}


def _drift(side: Side, role: str) -> dict[str, dict[str, str]]:
    """How far the arms of a role got from what they are compared with, by dtype."""
    rows = ((row["arm"].partition("."), row) for row in tables.comparison(side.records))
    return {dtype: row for (name, _, dtype), row in rows if name == role}
