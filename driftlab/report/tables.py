"""The tables of the report, as text ready for their cells; of many seeds, the notable ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import MISSING, number
from driftlab.report.series import all_arms, blown_up_at, first_flips, judged_against, narrow, role
from driftlab.words import Judgement

# Of an outcome, beside its word.
_QUANTITIES = ("loss", "accuracy", "disagreement")

# Rows of a table that a reader still scrolls through.
MOST_ROWS = 100
# Of those that diverged so many are shown, and so many from either end of each quantity.
_FALLEN, _ENDS = 40, 2  # the sentence says two
_SHARES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "greatest": 1.0}


def comparison(records: Sequence[SeedRecord]) -> list[dict[str, str]]:
    """A row an arm that has an against: how far it got from it, over seeds."""
    return [_comparison_row(records, arm) for arm in judged_against(records)]


def _comparison_row(records: Sequence[SeedRecord], arm: str) -> dict[str, str]:
    series = [r.series("weight_distance", arm) for r in records]
    fell = [blown_up_at(r, arm) is not None for r in records]
    finals = [math.inf if blew_up else _last(s) for s, blew_up in zip(series, fell, strict=True)]
    against = next(a["against"] for r in records if (a := r.run["arms"].get(arm, {})).get("against"))
    return {
        "arm": arm,
        "against": against,
        "last_step": str(max((max(s) for s in series if s), default=MISSING)),
        "gradient_distance": _middle([r.series("gradient_distance", arm).get(0) for r in records]),
        "first_flip": _flips(records, arm),
        "weight_distance": _middle(finals),
    }


def ascending(values: Iterable[float | None]) -> list[float]:
    """What was measured, NaN counted as inf."""
    return sorted(math.inf if math.isnan(v) else v for v in values if v is not None)


def _middle(
    values: Sequence[float | None], nothing: str = MISSING, write: Callable[[float], str] = number
) -> str:
    """The median, and of how many seeds where some have no value."""
    measured = ascending(values)
    if not measured:
        return nothing
    some = "" if len(measured) == len(values) else f" ({len(measured)} of {len(values)} seeds)"
    return write(median(measured)) + some


def _flips(records: Sequence[SeedRecord], arm: str) -> str:
    if not any(r.series("sign_flips", arm) for r in records):
        return MISSING
    return _middle(first_flips(records, arm), nothing="none", write="{:g}".format)


def outcome_arms(records: Sequence[SeedRecord]) -> list[str]:
    """The float32 arms, or all of them where none is float32; the reference first."""
    return narrow(sorted(all_arms(records), key=lambda a: role(a) != "reference"))


def outcomes(records: Sequence[SeedRecord], judgement: Judgement) -> list[dict]:
    """A row a seed, and in it a cell group an arm: outcome, final loss, test accuracy, disagreement."""
    arms = outcome_arms(records)
    return [{"seed": r.seed, "arms": [_outcome(r, arm, judgement.outcomes) for arm in arms]} for r in records]


def _outcome(record: SeedRecord, arm: str, judged: Mapping) -> dict:
    blew_up = blown_up_at(record, arm)
    fell_over = judged.get("fell_over", {}).get(arm, {}).get(record.seed)
    word = {True: "diverged", False: "finished", None: "finished"}[fell_over]
    if blew_up is not None:
        word = f"blew up at step {blew_up}"
    return {
        "arm": arm,
        "word": word if arm in record.run["arms"] else MISSING,
        "bad": bool(fell_over) or blew_up is not None,
        "loss": _last(record.series("loss", arm)),
        "accuracy": _last(record.series("test_accuracy", arm, table="evaluations")),
        "disagreement": _last(record.series("disagreement", arm, table="evaluations")),
    }


def _last(series: Mapping[int, float]) -> float | None:
    return series[max(series)] if series else None


def outcome_summary(rows: Sequence[Mapping]) -> list[dict[str, str]]:
    """Over all seeds, an entry an arm: how many finished, and the medians of the rest."""
    summary = []
    for cells in zip(*(row["arms"] for row in rows), strict=True):
        present = [c for c in cells if c["word"] != MISSING]
        good = sum(not c["bad"] for c in present)
        middle = {key: _median(c[key] for c in present) for key in _QUANTITIES}
        word = f"{good} of {len(present)} finished"
        summary.append({"arm": cells[0]["arm"], "word": word, "bad": False, **middle})
    return summary


def _median(values: Iterable[float | None]) -> float | None:
    measured = ascending(values)
    return median(measured) if measured else None


@dataclass(frozen=True)
class Notable:
    """Rows of the table of outcomes, what they are, and the spread of all of them."""

    rows: list[Mapping]
    sentence: str
    spread: list[tuple[str, list[dict]]]


def notable(rows: Sequence[Mapping]) -> Notable | None:
    """Of the rows that ``outcomes`` makes; None where there is room for all."""
    if len(rows) <= MOST_ROWS:
        return None
    fallen = [row for row in rows if any(cell["bad"] for cell in row["arms"])]
    fallen.sort(key=_alike)
    chosen = {row["seed"]: row for row in (*fallen[:_FALLEN], *_ends(rows))}
    shown = [chosen[seed] for seed in sorted(chosen)]
    return Notable(shown, _sentence(len(rows), len(fallen)), _spread(rows))


def _alike(row: Mapping) -> bool:
    """Whether all arms of a seed ended alike: where they did not, there is more to learn."""
    return len({cell["bad"] for cell in row["arms"]}) == 1


def _ends(rows: Sequence[Mapping]) -> Iterable[Mapping]:
    for place in range(len(rows[0]["arms"])):
        for quantity in _QUANTITIES:
            measured = [row for row in rows if _is_number(row["arms"][place][quantity])]
            measured.sort(key=lambda row: row["arms"][place][quantity])
            yield from (*measured[:_ENDS], *measured[-_ENDS:])


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _sentence(of: int, fallen: int) -> str:
    falls = f"An arm diverged in {fallen:,} of" if fallen else "No arm diverged in"
    shown = "these, and " if fallen else ""
    if fallen > _FALLEN:
        shown = f"{_FALLEN} of these, first those in which another arm did not, and "
    return (
        f"{falls} {of:,} seeds. Below are {shown}those with the two least and the two greatest values of "
        "each column. "
        "Of every seed, verdict.json says which runs diverged, and its folder seed=… holds the rest."
    )


def _spread(rows: Sequence[Mapping]) -> list[tuple[str, list[dict]]]:
    """A row a quantile, and in it each arm's; NaN counts as inf."""
    arms = [[row["arms"][place] for row in rows] for place in range(len(rows[0]["arms"]))]
    return [(label, [_quantiles(cells, share) for cells in arms]) for label, share in _SHARES.items()]


def _quantiles(cells: Sequence[Mapping], share: float) -> dict:
    present = [cell for cell in cells if cell["word"] != MISSING]
    found = {"arm": cells[0]["arm"], "word": "", "bad": False}
    if share == 0.5:
        found["word"] = f"{sum(not cell['bad'] for cell in present):,} of {len(present):,} finished"
    return found | {q: _quantile([cell[q] for cell in present], share) for q in _QUANTITIES}


def _quantile(values: Iterable[float | None], share: float) -> float | None:
    """The value of the seed that stands there in their order."""
    ordered = ascending(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else None
