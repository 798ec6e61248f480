"""The page that puts two experiments side by side, in one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from driftlab.records import write_whole
from driftlab.report import compare_outcomes, compare_tables
from driftlab.report.compare_tables import Pair, Side
from driftlab.report.templates import template

__all__ = ["Side", "sentence", "write_comparison"]


def write_comparison(folder: Path, pair: Pair) -> Path:
    """Write ``folder/compare.html``: verdicts, evidence, drift and outcomes of both, and what differs."""
    path = Path(folder) / "compare.html"
    write_whole(path, _render(pair))
    return path


def sentence(pair: Pair) -> str:
    """What the comparison says first."""
    a, b = (side.judgement for side in pair)
    if a.verdict != b.verdict:
        return f"Another verdict: A {a.verdict}, B {b.verdict}."
    if a.where != b.where:
        return f"The same verdict, {a.verdict}, at another place."
    return f"The same verdict: {a.verdict}."


def _render(pair: Pair) -> str:
    # here, because matplotlib takes most of a second, and who imports driftlab.report may not write a page
    from driftlab.report.compare_figure import drift_curves

    return template("compare.html.j2").render(
        pair=pair,
        sentence=sentence(pair),
        stand_ins=[side.label for side in pair if side.dataset.get("stand_in")],
        evidence=compare_tables.evidence(pair),
        drawing=drift_curves(pair),
        drift=compare_tables.drift(pair),
        outcomes=compare_outcomes.outcomes(pair),
        common_seeds=compare_outcomes.common_seeds(pair),
        settings=compare_tables.settings(pair),
        environment=compare_tables.environment(pair),
    )
