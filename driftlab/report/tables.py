"""The tables of the report, as text ready for their cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from driftlab import environments
from driftlab.records import SeedRecord
from driftlab.report.series import all_arms, blown_up_at, first_flips, judged_against
from driftlab.verdict import Judgement

MISSING = "—"

TEST_NAMES = {"discordant": "seeds with another outcome", "mcnemar_p": "McNemar's exact test, p"}


def number(value: float | None) -> str:
    """Three significant digits; a dash where nothing was measured, a word where it is not finite."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    return number(value) if value is None or not math.isfinite(value) else f"{100 * value:.2f} %"


def comparison(records: Sequence[SeedRecord]) -> list[dict[str, str]]:
    """A row an arm that has an against: how far it got from it, over seeds."""
    return [_comparison_row(records, arm) for arm in judged_against(records)]


def _comparison_row(records: Sequence[SeedRecord], arm: str) -> dict[str, str]:
    series = [r.series("weight_distance", arm) for r in records]
    finals = [_final(s, blown_up_at(r, arm)) for s, r in zip(series, records, strict=True)]
    against = next(a["against"] for r in records if (a := r.run["arms"].get(arm, {})).get("against"))
    return {
        "arm": arm,
        "against": against,
        "last_step": str(max((max(s) for s in series if s), default=MISSING)),
        "gradient_distance": _middle([r.series("gradient_distance", arm).get(0) for r in records]),
        "first_flip": _flips(records, arm),
        "weight_distance": _middle(finals),
    }


def _final(series: Mapping[int, float], blew_up: int | None) -> float | None:
    if blew_up is not None:
        return math.inf
    return series[max(series)] if series else None


def _middle(values: Iterable[float | None]) -> str:
    """The median, NaN counted as inf, and of how many seeds where some have no value."""
    values = list(values)
    measured = [math.inf if math.isnan(v) else v for v in values if v is not None]
    if not measured:
        return MISSING
    some = "" if len(measured) == len(values) else f" ({len(measured)} of {len(values)} seeds)"
    return number(median(measured)) + some


def _flips(records: Sequence[SeedRecord], arm: str) -> str:
    if not any(r.series("sign_flips", arm) for r in records):
        return MISSING
    steps = first_flips(records, arm)
    found = [s for s in steps if s is not None]
    if not found:
        return "none"
    some = "" if len(found) == len(steps) else f" ({len(found)} of {len(steps)} seeds)"
    return f"{median(found):g}{some}"


def outcome_arms(records: Sequence[SeedRecord]) -> list[str]:
    """The float32 arms, or all of them where none is float32; the reference first."""
    arms = sorted(all_arms(records), key=lambda a: not a.startswith("reference."))
    return [a for a in arms if a.endswith(".float32")] or arms


def outcomes(records: Sequence[SeedRecord], judgement: Judgement) -> list[dict]:
    """A row a seed, and in it a cell group an arm: outcome, final loss, test accuracy, disagreement."""
    arms = outcome_arms(records)
    return [{"seed": r.seed, "arms": [_outcome(r, arm, judgement.outcomes) for arm in arms]} for r in records]


def _outcome(record: SeedRecord, arm: str, judged: Mapping) -> dict:
    blew_up = blown_up_at(record, arm)
    fell_over = judged.get("fell_over", {}).get(arm, {}).get(record.seed)
    word = {True: "fell over", False: "finished", None: "finished"}[fell_over]
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
        middle = {key: _median(c[key] for c in present) for key in ("loss", "accuracy", "disagreement")}
        word = f"{good} of {len(present)} finished"
        summary.append({"arm": cells[0]["arm"], "word": word, "bad": False, **middle})
    return summary


def _median(values: Iterable[float | None]) -> float | None:
    measured = [math.inf if math.isnan(v) else v for v in values if v is not None]
    return median(measured) if measured else None


def paired_tests(judgement: Judgement) -> list[tuple[str, dict[str, str]]]:
    """A row an arm, a column each test in ``judgement.outcomes`` that has a number for that arm."""
    tests = {k: v for k, v in judgement.outcomes.items() if k != "fell_over" and isinstance(v, Mapping)}
    arms = list(dict.fromkeys(arm for values in tests.values() for arm in values))
    named = {TEST_NAMES.get(key, key.replace("_", " ")): values for key, values in tests.items()}
    return [(arm, {name: _cell(values.get(arm)) for name, values in named.items()}) for arm in arms]


def _cell(value: object) -> str:
    return number(value) if value is None or isinstance(value, int | float) else str(value)


def environment(records: Sequence[SeedRecord], dataset: Mapping) -> list[tuple[str, str]]:
    """Where it was measured, as pairs of a name and a value: the first seed, and what differs in others."""
    pairs = [(f"data set: {name.replace('_', ' ')}", _plain(value)) for name, value in dataset.items()]
    if not records:
        return pairs
    first = records[0].run.get("environment", {})
    pairs += [(name.replace("_", " "), _plain(value)) for name, value in first.items()]
    apart = environments.notice({r.seed: r.run for r in records})
    if apart is not None:
        pairs += [("not in all seeds", line) for line in (*apart.loud, *apart.quiet)]
    seconds = [s for r in records if (s := r.run.get("times", {}).get("seconds")) is not None]
    if seconds:
        pairs.append(("time", f"{sum(seconds):,.0f} s for {len(seconds)} seed{'s' * (len(seconds) > 1)}"))
    return pairs


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items() if v is not None) or MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return MISSING if value is None else str(value)
