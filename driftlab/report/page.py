"""The page: tables and figures put into the template, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from driftlab import environments
from driftlab.records import SeedRecord, write_whole
from driftlab.report import rendering, tables
from driftlab.report.notable import notable
from driftlab.report.sections import Answer
from driftlab.report.series import MOST_LINES, all_arms
from driftlab.report.templates import template
from driftlab.verdict import Judgement

# Of a longer table the rest stands in its file alone: a page that grows with the seeds does not open at last.
MOST_TABLE_ROWS = 500


def write_report(
    folder: Path,
    records: Sequence[SeedRecord],
    judgement: Judgement,
    meta: Mapping,
    answer: Answer | None = None,
) -> Path:
    """Write ``folder/report.html``: the verdict, what it rests on, and how to repeat it.

    Args:
        records: finished seeds of one experiment; there may be none.
        judgement: the verdict on them.
        meta: ``experiment``, ``digest``, ``hypothesis``, ``expected`` (a verdict or None), ``command``,
            ``settings`` (YAML text) and ``dataset`` (as in ``run.json``).
        answer: what the experiment has to show beside its verdict, where it has.
    """
    path = Path(folder) / "report.html"
    write_whole(path, _render(records, judgement, meta, answer))
    return path


def _render(records: Sequence[SeedRecord], judgement: Judgement, meta: Mapping, answer: Answer | None) -> str:
    rows = tables.outcomes(records, judgement)
    most = notable(rows)
    drawings, layers = _drawings(records)
    switches = [arm for d in drawings for arm in d.arms] + (layers.switches if layers else [])
    return template("page.html.j2").render(
        meta=_filled(meta),
        judgement=judgement,
        seeds=[r.seed for r in records],
        answer=_answered(answer) if answer else None,
        comparison=tables.comparison(records),
        drawings=drawings,
        roles={arm.partition(".")[0] for arm in all_arms(records)},
        layers=layers,
        switches=list(dict.fromkeys(switches)),
        most_lines=MOST_LINES,
        outcome_arms=tables.outcome_arms(records),
        outcomes=most.rows if most else rows,
        notable=most,
        notice=environments.notice({r.seed: r.run for r in records}),
        outcome_summary=tables.outcome_summary(rows) if len(rows) > 1 else [],
        paired_tests=tables.paired_tests(judgement),
        environment=tables.environment(records, meta.get("dataset") or {}),
    )


def _answered(answer: Answer) -> dict:
    figures = [
        {"name": f.name, "title": f.title, "svg": rendering.in_page(f), "caption": f.caption}
        for f in answer.figures
    ]
    tables = [rendering.shown(t, most=MOST_TABLE_ROWS) for t in answer.tables]
    return {"sentence": answer.sentence, "figures": figures, "tables": tables}


def _filled(meta: Mapping) -> dict:
    names = ("experiment", "digest", "hypothesis", "expected", "command", "settings")
    return {name: meta.get(name) or "" for name in names} | {"dataset": meta.get("dataset") or {}}


def _drawings(records: Sequence[SeedRecord]) -> tuple[list, object]:
    """The figures over steps, and the per-layer picture where there is one."""
    # here, because matplotlib takes most of a second, and who imports driftlab.report may not write a page
    from driftlab.report import figures, layers

    drawings = (figures.weight_distance(records), figures.sign_flips(records), figures.loss(records))
    return [d for d in drawings if d is not None], layers.layer_picture(records)
