"""The page: tables and figures put into the template, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from driftlab.records import SeedRecord, write_whole
from driftlab.report import tables
from driftlab.verdict import Judgement


def write_report(folder: Path, records: Sequence[SeedRecord], judgement: Judgement, meta: Mapping) -> Path:
    """Write ``folder/report.html``: the verdict, what it rests on, and how to repeat it.

    Args:
        records: finished seeds of one experiment; there may be none.
        judgement: the verdict on them.
        meta: ``experiment``, ``digest``, ``hypothesis``, ``expected`` (a verdict or None), ``command``,
            ``settings`` (YAML text) and ``dataset`` (as in ``run.json``).
    """
    path = Path(folder) / "report.html"
    write_whole(path, _render(records, judgement, meta))
    return path


def _render(records: Sequence[SeedRecord], judgement: Judgement, meta: Mapping) -> str:
    templates = Environment(
        loader=PackageLoader("driftlab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"number": tables.number, "percent": tables.percent}
    rows = tables.outcomes(records, judgement)
    return templates.get_template("page.html.j2").render(
        meta=_filled(meta),
        judgement=judgement,
        seeds=[r.seed for r in records],
        comparison=tables.comparison(records),
        drawings=_drawings(records),
        outcome_arms=tables.outcome_arms(records),
        outcomes=rows,
        outcome_summary=tables.outcome_summary(rows) if len(rows) > 1 else [],
        paired_tests=tables.paired_tests(judgement),
        environment=tables.environment(records, meta.get("dataset") or {}),
    )


def _filled(meta: Mapping) -> dict:
    names = ("experiment", "digest", "hypothesis", "expected", "command", "settings")
    return {name: meta.get(name) or "" for name in names} | {"dataset": meta.get("dataset") or {}}


def _drawings(records: Sequence[SeedRecord]) -> list:
    # here, because matplotlib takes most of a second, and who imports driftlab.report may not write a page
    from driftlab.report import figures

    drawings = (figures.weight_distance(records), figures.sign_flips(records), figures.loss(records))
    return [d for d in drawings if d is not None]
