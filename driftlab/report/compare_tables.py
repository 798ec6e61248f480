"""Two experiments side by side: evidence, drift, settings, environment, as text for cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from driftlab.records import SeedRecord
from driftlab.report import tables
from driftlab.report.tables import MISSING, number
from driftlab.verdict import Evidence, Judgement


@dataclass(frozen=True)
class Side:
    """One of the two experiments.

    Attributes:
        label: "A" or "B".
        settings: nested, as in ``experiment.yaml``.
        records: its finished seeds, at least one.
    """

    label: str
    experiment: str
    digest: str
    settings: Mapping
    records: Sequence[SeedRecord]
    judgement: Judgement

    @property
    def dataset(self) -> Mapping:
        return self.records[0].run["dataset"]


Pair = tuple[Side, Side]


@dataclass(frozen=True)
class Asked:
    """What one probe found in both: None where it was not asked.

    Attributes:
        marked: whether the two speak for different verdicts, or only one was asked.
        differs: what differs, in a few words; "" where nothing does.
    """

    probe: str
    found: tuple[Evidence | None, Evidence | None]
    marked: bool
    differs: str


def evidence(pair: Pair) -> list[Asked]:
    """By probe, in the order of A and then of what only B was asked."""
    by_probe = [{e.probe: e for e in side.judgement.evidence} for side in pair]
    probes = dict.fromkeys(probe for found in by_probe for probe in found)
    return [_asked(probe, *(found.get(probe) for found in by_probe)) for probe in probes]


def _asked(probe: str, a: Evidence | None, b: Evidence | None) -> Asked:
    if a is None or b is None:
        return Asked(probe, (a, b), True, f"asked in {'B' if a is None else 'A'} alone")
    said = []
    if a.supports != b.supports:
        said.append("speaks for another verdict")
    if a.measured != b.measured:
        said.append(_times(a.measured, b.measured))
    if a.threshold != b.threshold:
        said.append("another threshold")
    return Asked(probe, (a, b), a.supports != b.supports, ", ".join(said))


def _times(a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return f"measured in {'B' if a is None else 'A'} alone"
    if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b):
        return f"B is {number(b / a)} times A"
    return "measured otherwise"


def drift(pair: Pair) -> list[dict]:
    """A row an arm that is compared with another: medians of how far it got from it, in both."""
    by_arm = [{row["arm"]: row for row in tables.comparison(side.records)} for side in pair]
    kinds = ("weight_distance", "first_flip", "last_step")
    return [
        {"arm": arm} | {k: [found[arm][k] if arm in found else MISSING for found in by_arm] for k in kinds}
        for arm in dict.fromkeys(arm for found in by_arm for arm in found)
    ]


# Where and how a run was stored, not what was run.
STORING = ("results", "rerun", "fail_on", "logger", "checkpoint_every", "data.root", "data.time_limit")


def settings(pair: Pair) -> list[tuple[str, str, str]]:
    """The settings that differ, as name, A and B, in the order of the files."""
    flat = [_flat(side.settings) for side in pair]
    return [row for row in _differing(*flat) if not row[0].startswith(STORING)]


def environment(pair: Pair) -> list[tuple[str, str, str]]:
    """What differs in the environment or the data set; several values where the seeds of one differ."""
    return _differing(*(_environment(side) for side in pair))


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
