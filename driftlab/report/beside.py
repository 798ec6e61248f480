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
    control = [row for row in _drift(sides[0]) if row["arm"].startswith("control.")]
    page = template("beside.html.j2").render(
        sides=sides,
        rows=rows,
        control=control,
        drawing=drift_beside(sides),
        stand_in=sides[0].dataset.get("stand_in"),
    )
    write_whole(path, page)
    return path


def _row(side: Side, report: str) -> dict:
    """A side with its link and how far its candidate got from the reference, by dtype."""
    drift = {row["arm"].partition(".")[2]: row for row in _drift(side) if row["arm"].startswith("candidate.")}
    return {"side": side, "report": report, "drift": drift}


def _drift(side: Side) -> list[dict[str, str]]:
    rows = tables.comparison(side.records)
    return [
        {"arm": row["arm"], **{k: row.get(k, MISSING) for k in ("weight_distance", "first_flip")}}
        for row in rows
    ]
