"""One quantity of one arm over all seeds, as the figures and the tables need it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from driftlab.measures import Measure
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.evidence import first_flip

# Beyond this many seeds lines of their own tell nothing, and the page would grow with them.
MOST_LINES = 100
_ORDER = {"candidate": 0, "control": 1}


def all_arms(records: Sequence[SeedRecord]) -> list[str]:
    """Every arm of any seed: what is judged and its yardstick, by dtype; then the references."""

    def rank(arm: str) -> tuple:
        role, _, dtype = arm.partition(".")
        return role == "reference", dtype, _ORDER.get(role, len(_ORDER)), arm

    return sorted({arm for record in records for arm in record.arms}, key=rank)


def blown_up_at(record: SeedRecord, arm: str) -> int | None:
    """The step at which an arm of a seed blew up; None where it did not, or is not part of the seed."""
    return record.run["arms"].get(arm, {}).get("blown_up_at")


def role(arm: str) -> str:
    """What stands before the dot."""
    return arm.partition(".")[0]


def narrow(arms: Sequence[str]) -> list[str]:
    """The float32 arms, or all of them where none is float32."""
    return [a for a in arms if a.endswith(".float32")] or list(arms)


def judged_against(records: Sequence[SeedRecord]) -> list[str]:
    """The arms that are compared with another one, and so have distances."""
    return [a for a in all_arms(records) if any(r.run["arms"].get(a, {}).get("against") for r in records)]


@dataclass(frozen=True)
class Bundle:
    """One column over seeds.

    Attributes:
        seeds: of the rows of ``values``.
        steps: the logged steps, ascending.
        values: a row a seed. NaN where nothing was measured, inf where the value was not finite and, for
            a seed that blew up, everywhere after that: leaving such seeds out would make the median of
            the others look calm.
    """

    arm: str
    seeds: list[int]
    steps: np.ndarray
    values: np.ndarray

    @property
    def median(self) -> np.ndarray:
        return _over_seeds(np.nanmedian, self.values)

    @property
    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest finite value at each step."""
        finite = np.where(np.isfinite(self.values), self.values, np.nan)
        return _over_seeds(np.nanmin, finite), _over_seeds(np.nanmax, finite)

    def quantiles(self, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        """Those of the seeds at each step: the value of one of them, inf where that one has blown up."""

        reduce = partial(np.nanquantile, q=(low, high), method="inverted_cdf")
        return tuple(_over_seeds(reduce, self.values))

    @property
    def last_finite(self) -> list[tuple[int, float]]:
        """The step and the value just before a seed's first inf, for each seed that has one."""
        points = []
        for row in self.values:
            before = np.flatnonzero(~np.isnan(row[: int(np.argmax(np.isinf(row)))]))
            if len(before):
                points.append((int(self.steps[before[-1]]), float(row[before[-1]])))
        return points


def _over_seeds(reduce, values: np.ndarray) -> np.ndarray:
    """Reduce over seeds; NaN, and no warning, at a step where no seed has a value."""
    measured = ~np.isnan(values).all(axis=0)
    reduced = reduce(values[:, measured], axis=0)
    result = np.full((*reduced.shape[:-1], len(measured)), np.nan)
    result[..., measured] = reduced
    return result


def bundles_of(records: Sequence[SeedRecord], measure: Measure, arms: Iterable[str]) -> list[Bundle]:
    """The curves of those arms that have any."""
    found = (bundle(records, measure.name, arm, measure.moment.value) for arm in arms)
    return [drawn for drawn in found if drawn is not None]


def bundle(records: Sequence[SeedRecord], kind: str, arm: str, table: str = "curves") -> Bundle | None:
    """The column ``<kind>/<arm>`` of every seed; None where no seed has it."""
    columns = {record.seed: record.series(kind, arm, table=table) for record in records}
    steps = np.array(sorted({step for column in columns.values() for step in column}), dtype=int)
    if not len(steps):
        return None
    values = np.full((len(records), len(steps)), np.nan)
    for row, record in zip(values, records, strict=True):
        column = columns[record.seed]
        measured = [value if math.isfinite(value) else math.inf for value in column.values()]
        row[np.searchsorted(steps, list(column))] = measured
        if (end := blown_up_at(record, arm)) is not None:
            row[steps > end] = math.inf
    return Bundle(arm, [r.seed for r in records], steps, values)


def thin(positions: np.ndarray, values: np.ndarray, most: int = 400) -> np.ndarray:
    """The indices of at most ``most`` points that draw the same line.

    The axis is cut into cells, and each keeps its least and its greatest point: a leap of one step stays.
    Positions are places on the axis, not steps, so that a logarithmic axis keeps its early steps.
    """
    if len(positions) <= most:
        return np.arange(len(positions))
    span = max(positions[-1] - positions[0], 1e-9)
    cells = np.minimum(((positions - positions[0]) / span * (most // 2 - 1)).astype(int), most // 2 - 2)
    kept = {0, len(positions) - 1}
    for members in np.split(np.arange(len(positions)), np.flatnonzero(np.diff(cells)) + 1):
        finite = members[np.isfinite(values[members])]
        members = finite if len(finite) else members[:1]  # one of them is enough to keep a gap
        kept |= {int(members[np.argmin(values[members])]), int(members[np.argmax(values[members])])}
    return np.array(sorted(kept))


def first_flips(records: Sequence[SeedRecord], arm: str) -> list[int | None]:
    """For each seed the first logged step with a sign flip, None where there is none."""
    return [first_flip(record, arm) for record in records]
