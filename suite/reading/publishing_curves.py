"""What a training has to show where it is published: the curves, a line an arm, and a sentence over both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from driftlab.record.seed_record import SeedRecord, write_whole
from driftlab.report.paper import write_curves
from driftlab.report.sections import Table, as_csv, shown
from driftlab.report.series import all_arms, blown_up_at, first_flips, judged_against
from driftlab.report.tables import MISSING, number
from driftlab.verdict.outcomes import fell_over, tail_of
from driftlab.words import counted
from suite.showing.wording import last

TITLE = "Every arm at its end"
COLUMNS = {
    "arm": "arm",
    "against": "against",
    "n": "seeds",
    "steps": "steps",
    "weight_distance": "weight distance at the end (relative)",
    "first_flip": "first sign flip (step)",
    "sign_flips": "sign flips at the end (count)",
    "loss": "training loss at the end",
    "test_accuracy": "test accuracy (%)",
    "disagreement": "disagreement (% of the test set)",
}
_PERCENT = ("test_accuracy", "disagreement")
_SPREAD = ("weight_distance", "first_flip", "sign_flips", "loss", *_PERCENT)
_PARTS = {"value": median, "low": min, "high": max, "n": len}


def published_curves(page: Path, records: Sequence[SeedRecord]) -> dict:
    """Write the figure and ``tables/arms.csv`` beside the page; what ``answer.json`` would hold of them."""
    curves = write_curves(records, page / "figures", "double")
    rows = [_of_seed(record, arm) for arm in all_arms(records) for record in records if arm in record.arms]
    columns = {"seed": "seed", **COLUMNS, "measured_at": "step of the weight distance"}
    by_seed = Table("arms", TITLE, columns, rows, "")
    write_whole(page / "tables" / "arms.csv", as_csv(by_seed))
    write_whole(page / "tables" / "arms.numbers.csv", as_csv(over_seeds(rows)))
    table = Table("arms", TITLE, COLUMNS, [_of_arm(rows, a) for a in all_arms(records)], _how(len(records)))
    name = curves.files[0].stem
    figure = {"name": name, "title": "Drift, sign flips and loss over steps", "caption": curves.caption}
    return {"sentence": sentence(records), "tables": [vars(shown(table))], "figures": [figure]}


def _how(n: int) -> str:
    return (
        f"Median of {n} seeds (least to greatest). Loss: of batches, the median of the last tenth of rows. "
        "Distance, flips and disagreement are those from the arm under `against`."
        if n > 1
        else "One seed. Loss: of batches, the median of the last tenth of rows."
    )


def _of_seed(record: SeedRecord, arm: str) -> dict:
    """The numbers of one arm in one seed; inf where it blew up, None where nothing was measured."""
    blew_up = blown_up_at(record, arm)
    ends = {k: last(record.series(k, arm)) for k in ("weight_distance", "sign_flips")}
    ends |= {k: last(record.series(k, arm, table="evaluations")) for k in _PERCENT}
    if blew_up is not None:
        ends |= {"weight_distance": math.inf} if ends["weight_distance"] is not None else {}
    losses = list(record.series("loss", arm).values())
    against = record.run["arms"][arm]["against"]
    return {
        "seed": record.seed,
        "arm": arm,
        "against": against,
        "n": 1,
        "steps": max(record.series("loss", arm), default=None),
        "measured_at": max(record.series("weight_distance", arm), default=None),
        "first_flip": first_flips([record], arm)[0],
        "loss": math.inf if blew_up is not None else median(losses[-tail_of(len(losses)) :]),
        **ends,
        **{k: None if ends[k] is None else 100 * ends[k] for k in _PERCENT},
    }


def _of_arm(rows: Sequence[Mapping], arm: str) -> dict:
    mine = [row for row in rows if row["arm"] == arm]
    kinks = any(row["sign_flips"] is not None for row in mine)
    texts = {key: with_range([row[key] for row in mine]) for key in _SPREAD}
    at = {row["measured_at"] for row in mine if row["measured_at"] is not None}
    if len(at) == 1 and at != {row["steps"] for row in mine}:  # what it is compared with ended before it
        for key in ("weight_distance", "sign_flips"):
            texts[key] += f" at step {min(at):,}"
    if kinks and texts["first_flip"] == MISSING:
        texts["first_flip"] = "none"
    steps = sorted({row["steps"] for row in mine if row["steps"] is not None})
    return {
        "arm": arm,
        "against": mine[0]["against"],
        "n": len(mine),
        "steps": f"{steps[-1]:,}" if steps else None,
        **texts,
    }


def over_seeds(rows: Sequence[Mapping]) -> Table:
    """A row an arm: value (the median over seeds), low, high and n of each measure, in columns of their own.

    Args:
        rows: an arm in a seed each; None where nothing was measured.
    """
    columns = {key: COLUMNS[key] for key in ("arm", "against")}
    columns |= {f"{key}: {part}": f"{COLUMNS[key]}: {part}" for key in _SPREAD for part in _PARTS}
    arms = {row["arm"]: row["against"] for row in rows}
    lines = []
    for arm, against in arms.items():
        lines.append({"arm": arm, "against": against})
        for key in _SPREAD:
            found = [row[key] for row in rows if row["arm"] == arm and row[key] is not None]
            numbers = {part: of(found) for part, of in _PARTS.items()} if found else {"n": 0}
            lines[-1] |= {f"{key}: {part}": number for part, number in numbers.items()}
    return Table("arms.numbers", TITLE, columns, lines, "")


def with_range(values: Iterable[float | None]) -> str:
    """Median (least to greatest), and of how many where some were not measured."""
    values = list(values)
    found = sorted(v for v in values if v is not None)
    if not found:
        return MISSING
    some = "" if len(found) == len(values) else f", {len(found)} of {len(values)} seeds"
    middle = _three(median(found))
    if found[0] == found[-1]:
        return middle + (f" ({some[2:]})" if some else "")
    return f"{middle} ({_three(found[0])} to {_three(found[-1])}{some})"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else number(value)


def sentence(records: Sequence[SeedRecord]) -> str:
    """What the curves of all seeds show, arm by arm."""
    rows = {a: [_of_seed(r, a) for r in records if a in r.arms] for a in all_arms(records)}
    drifting = [a for a in judged_against(records) if not a.startswith("reference.")] or judged_against(
        records
    )
    drift = [_drift({a: rows[a] for a in drifting if a.endswith(d)}, d) for d in ("float32", "float64")]
    parted = " ".join(d for d in drift if d).removesuffix(";")
    return " ".join(s for s in (_fallen(records), f"{parted}." if parted else "", _ends(rows)) if s)


def _fallen(records: Sequence[SeedRecord]) -> str:
    fallen = {a: sum(fell_over(r, a) for r in records if a in r.arms) for a in all_arms(records)}
    n = counted(len(records), "seed")
    if not any(fallen.values()):
        return f"No arm's loss diverges, in {n}; how far the weights part:"
    counts = ", ".join(f"{arm} in {count}" for arm, count in fallen.items() if count)
    return f"The loss diverges for {counts} of {n}; how far the weights part:"


def _drift(arms: Mapping[str, Sequence[Mapping]], dtype: str) -> str:
    """How far the arms of a dtype got from their references, and when their first sign flipped."""
    ends = {a: with_range([r["weight_distance"] for r in rows]) for a, rows in arms.items()}
    ends = {a: text for a, text in ends.items() if text != MISSING}
    if not ends:
        return ""
    steps = max(row["steps"] for a in ends for row in arms[a])
    far = ", ".join(f"{a.partition('.')[0]} {text}" for a, text in ends.items())
    return f"in {dtype}, after {steps:,} steps, {far} (relative), {_first_flips(arms, list(ends))};"


def _first_flips(arms: Mapping[str, Sequence[Mapping]], names: Sequence[str]) -> str:
    found = {a: [r["first_flip"] for r in arms[a] if r["first_flip"] is not None] for a in names}
    if not any(found.values()):
        return "without a sign flip"
    words = [_first_flip(steps, len(arms[a])) for a, steps in found.items()]
    return f"first sign flip {', '.join(words)}"


def _first_flip(found: Sequence[int], n: int) -> str:
    if not found:
        return "nowhere"
    return f"at step {median(found):g}" + ("" if len(found) == n else f" in {len(found)} of {n}")


def _ends(rows: Mapping[str, Sequence[Mapping]]) -> str:
    """Test accuracy as paired differences from the reference, and disagreement with it."""
    own = {row["seed"]: row["test_accuracy"] for row in rows.get("reference.float32", [])}
    said = []
    for arm in ("candidate.float32", "control.float32"):
        pairs = [(row["test_accuracy"], own.get(row["seed"])) for row in rows.get(arm, [])]
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if differences:
            apart = with_range([row["disagreement"] for row in rows[arm]])
            spread = f" +- {stdev(differences):.2f}" if len(differences) > 1 else ""
            said.append(
                f"{arm.partition('.')[0]} {fmean(differences):+.2f}{spread} points, {apart} % of the test "
                "set classified otherwise"
            )
    found = [a for a in own.values() if a is not None]
    if not said:
        return ""
    return (
        f"Test accuracy of the float32 reference {with_range(found)} %; against it (mean +- SD of the pairs) "
        f"{'; '.join(said)}."
    )
