"""What the suite says about groups=2 and what is taken for the same, as a table with its conclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from driftlab.report.sections import Table
from experiments.questions.group.verdicts import KEPT_ZEROS, SAME_NUMBERS
from experiments.questions.group.words import between, seeds_text


def verdict_table(values: Mapping[int, dict]) -> Table:
    """Rewrite by rewrite: verdict, place and the evidence that decides."""
    everything = [row for v in values.values() for row in v["verdicts"]]
    keys = dict.fromkeys((row["subject"], row["rewrite"]) for row in everything)
    rows = [_row(key, [r for r in everything if (r["subject"], r["rewrite"]) == key]) for key in keys]
    columns = {
        "subject": "of",
        "rewrite": "grouped convs rewritten as",
        "verdict": "verdict (seeds)",
        "start": "same before training (seeds)",
        "apart": "outputs apart before training (relative 2-norm, float64)",
        "place": "place",
        "probe": "first evidence for it",
        "measured": "it measures (function: multiples of float64 rounding)",
        "threshold": "threshold (same unit)",
    }
    zeros = [v["zeros"] for v in values.values()]
    title = "What the suite says: groups against what is taken for the same"
    return Table("verdicts", title, columns, rows, _conclusion(rows, zeros))


def _row(key: tuple[str, str], found: Sequence[dict]) -> dict:
    counts = Counter(row["verdict"] for row in found)
    return {
        "subject": key[0],
        "rewrite": key[1],
        "verdicts": set(counts),
        "verdict": ", ".join(f"{v} ({count} of {len(found)})" for v, count in counts.most_common()),
        "start": f"{sum(row['same_at_start'] for row in found)} of {len(found)}",
        "same": all(row["same_at_start"] for row in found),
        "apart": max(row["apart"] for row in found),
        "place": found[0]["place"],
        **{key: found[0][key] for key in ("probe", "measured", "threshold")},
    }


def _conclusion(rows: Sequence[dict], zeros: Sequence[dict]) -> str:
    said: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        said.setdefault(row["subject"], {}).setdefault(row["verdict"], []).append(row["rewrite"])
    if len(said) > 1 and len({str(verdicts) for verdicts in said.values()}) == 1:
        said = {f"{' and of '.join(said)} alike": next(iter(said.values()))}
    texts = [
        f"Of {subject}: "
        + " ".join(f"{verdict} for {'; '.join(names)}." for verdict, names in verdicts.items())
        for subject, verdicts in said.items()
    ]
    places = "Places and evidence are those of the first seed, distances the largest of all seeds."
    return " ".join([*texts, *_about_zeros(rows, zeros), places])


def _about_zeros(rows: Sequence[dict], zeros: Sequence[dict]) -> list[str]:
    loose, kept = ([row for row in rows if row["rewrite"] == name] for name in (SAME_NUMBERS, KEPT_ZEROS))
    if not all(row["same"] and row["verdicts"] == {"bug"} for row in loose):
        return []
    pulled, count = (sum(z[key] for z in zeros) for key in ("pulled", "zeros"))
    ratios = [z["ratio"] for z in zeros]
    texts = [
        "The same numbers with zeros elsewhere are the same function before training and not after: "
        f"{pulled:,} of {count:,} zeros ({seeds_text(len(zeros))}) get a gradient at the first batch, "
        f"{between(min(ratios), max(ratios))} times as large (root mean square) as the weights in the "
        "blocks get, so the first update moves them, and what is trained is groups=1."
    ]
    if not any("bug" in row["verdicts"] for row in kept):
        texts.append("Kept at zero they train as groups do, with the multiply-adds of groups=1.")
    return texts
