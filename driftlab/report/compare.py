"""The page that puts two experiments side by side, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from driftlab.record.seed_record import write_whole
from driftlab.report import compare_tables
from driftlab.report.compare_tables import Pair, Side
from driftlab.report.page import template
from driftlab.report.sections import MISSING

__all__ = ["Side", "environment", "sentence", "settings", "write_comparison"]

# Where and how a run was stored, not what was run.
STORING = ("results", "rerun", "fail_on", "logger", "checkpoint_every", "data.root", "data.time_limit")


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
    from driftlab.report.figures import drift_of_both

    return template("compare.html.j2").render(
        pair=pair,
        sentence=sentence(pair),
        stand_ins=[side.label for side in pair if side.dataset.get("stand_in")],
        evidence=compare_tables.evidence(pair),
        drawing=drift_of_both(pair),
        drift=compare_tables.drift(pair),
        outcomes=compare_tables.outcomes(pair),
        common_seeds=compare_tables.common_seeds(pair),
        settings=settings(pair),
        environment=environment(pair),
    )


def settings(pair: Pair) -> list[tuple[str, str, str]]:
    """The settings that differ, as name, A and B, in the order of the files."""
    flat = [_flat(side.settings) for side in pair]
    return [row for row in _differing(*flat) if not row[0].startswith(STORING)]


def environment(pair: Pair) -> list[tuple[str, str, str]]:
    """What differs in the data set, or in the environment as far as both record it; several values where the
    seeds of one differ."""
    rows = _differing(*(_environment(side) for side in pair))
    return [row for row in rows if MISSING not in row[1:] or row[0].startswith("data set")]


def _environment(side: Side) -> dict[str, str]:
    seen: dict[str, dict[str, None]] = {}
    for record in side.records:
        for name, value in _flat({"data set": record.run["dataset"], **record.run["environment"]}).items():
            seen.setdefault(name, {})[value] = None
    return {name: " or ".join(values) for name, values in seen.items()}


def _flat(value: Mapping, prefix: str = "") -> dict[str, str]:
    """Dotted name -> value as text; lists are values."""
    found = {}
    for key, below in value.items():
        if isinstance(below, Mapping) and below:
            found |= _flat(below, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(below)
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = dict.fromkeys((*a, *b))
    rows = ((name, a.get(name, MISSING), b.get(name, MISSING)) for name in names)
    return [row for row in rows if row[1] != row[2]]
