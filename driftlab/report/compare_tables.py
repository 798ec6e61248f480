"""Two experiments side by side: evidence, drift and outcomes, as text for cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from driftlab.record.seed_record import SeedRecord
from driftlab.report import tables
from driftlab.report.sections import MISSING, number, percent
from driftlab.report.tables import ascending
from driftlab.verdict.statistics import mcnemar_exact
from driftlab.words import Evidence, Judgement


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


@dataclass(frozen=True)
class Quantity:
    """What is compared of an arm: a number that ``text`` writes, its unit, and the unit of a difference."""

    name: str
    text: Callable[[float], str]
    unit: str = ""
    difference: str = ""


def _percent(value: float) -> str:
    return percent(value).removesuffix(" %")


QUANTITIES = {
    "loss": Quantity("final loss (last batch)", number),
    "accuracy": Quantity("test accuracy", _percent, " %", " points"),
    "disagreement": Quantity("disagreement", _percent, " %", " points"),
}


def common_seeds(pair: Pair) -> list[int]:
    """The seeds that both hold."""
    a, b = ({record.seed for record in side.records} for side in pair)
    return sorted(a & b)


def outcomes(pair: Pair) -> list[dict]:
    """A row an arm and quantity: both sides over their seeds, and B - A over the seeds that both hold."""
    cells = [_cells(side) for side in pair]
    arms = dict.fromkeys(arm for found in cells for arm in found)
    return [row for arm in arms for row in _arm_rows(arm, *(found.get(arm, {}) for found in cells))]


def _cells(side: Side) -> dict[str, dict[int, dict]]:
    """Arm -> seed -> outcome, final loss, accuracy, disagreement."""
    found: dict[str, dict[int, dict]] = {}
    for row in tables.outcomes(side.records, side.judgement):
        for cell in row["arms"]:
            if cell["word"] != MISSING:
                found.setdefault(cell["arm"], {})[row["seed"]] = cell
    return found


def _arm_rows(arm: str, a: Mapping[int, dict], b: Mapping[int, dict]) -> Iterable[dict]:
    common = sorted(a.keys() & b.keys())
    finished = {"sides": [_finished(a), _finished(b)], "paired": _paired_outcomes(a, b, common)}
    yield {"arm": arm, "quantity": "finished", **finished}
    for key, asked in QUANTITIES.items():
        if key == "disagreement" and arm.startswith("reference."):
            continue  # its own reference is the float64 one, which ends long before it
        sides = [_spread([c[key] for c in side.values()], asked.text, asked.unit) for side in (a, b)]
        if sides != [MISSING, MISSING]:
            differences = [_difference(a[s][key], b[s][key]) for s in common]
            paired = _spread(differences, _signed(asked.text), asked.difference)
            yield {"arm": arm, "quantity": asked.name, "sides": sides, "paired": paired}


def _difference(a: float | None, b: float | None) -> float | None:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    return b - a


def _finished(cells: Mapping[int, dict]) -> str:
    return f"{sum(not c['bad'] for c in cells.values())} of {len(cells)}" if cells else MISSING


def _paired_outcomes(a: Mapping[int, dict], b: Mapping[int, dict], seeds: Sequence[int]) -> str:
    """How many ended otherwise, and McNemar's exact p where any did."""
    mine, theirs = ([side[s]["bad"] for s in seeds] for side in (a, b))
    other = sum(x != y for x, y in zip(mine, theirs, strict=True))
    if not other:
        return "all ended alike" if seeds else MISSING
    return f"{other} of {len(seeds)} otherwise (p {number(mcnemar_exact(mine, theirs))})"


def _signed(text: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: f"{'+' if value > 0 else ''}{text(value)}"


def _spread(values: Sequence[float | None], text: Callable[[float], str], unit: str) -> str:
    """The median and the range, NaN counted as inf, and of how many where some have no value."""
    known = ascending(values)
    if not known:
        return MISSING
    some = "" if len(known) == len(values) else f"{len(known)} of {len(values)} seeds"
    spread = f"{text(known[0])} to {text(known[-1])}" if len(known) > 1 else ""
    more = ", ".join(part for part in (spread, some) if part)
    return f"{text(median(known))}{unit}" + (f" ({more})" if more else "")
