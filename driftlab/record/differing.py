"""Whether the seeds of an experiment ran in the same environment, and what it means where they did not.

``environment`` in ``run.json`` says where a seed ran. A sweep over a cluster may meet two types of GPU, and a
seed may be resumed on another node. Neither changes a verdict: candidate and control of a seed run together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

# What a sum does not depend on. Everything else counts.
_QUIET = ("python", "versions.")
_VERSIONS_THAT_SUM = ("versions.torch",)
# So many are written out, so that a line stays one to read.
_MOST_RANGES, _MOST_VALUES = 6, 6
_NOT_RECORDED = "not recorded"

APART = "The seeds did not run in the same environment."
WHY_APART = (
    "Kernels, and with them the order and the width of sums, differ between devices, versions and settings: "
    "distances over these seeds are not samples of one distribution, so read medians and ranges by group. "
    "Each seed stands beside its own control, which ran where it did: that comparison holds, and so does "
    "the verdict."
)
MOVED = "Seeds were resumed in another environment."
WHY_MOVED = (
    "A seed that moved repeats in neither environment bit for bit. All of its arms moved together, so they "
    "still compare step by step."
)


@dataclass(frozen=True)
class Difference:
    """One entry of the environment that is not the same in all seeds.

    Attributes:
        key: its name, dotted where it is nested: ``tf32.matmul``.
        values: what it was -> in which seeds, ascending.
        changes_sums: whether rounding depends on it.
    """

    key: str
    values: dict[str, list[int]]
    changes_sums: bool

    def __str__(self) -> str:
        """In one line: "device: NVIDIA A100-SXM4-80GB for seeds 0..4; NVIDIA H100 for seeds 5..9"."""
        ordered = sorted(self.values.items(), key=lambda item: (-len(item[1]), item[1]))
        shown, others = sorted(ordered[:_MOST_VALUES], key=lambda item: item[1]), ordered[_MOST_VALUES:]
        said = [f"{value} for {seeds_text(seeds)}" for value, seeds in shown]
        if others:
            said.append(f"{len(others)} other values for {sum(len(seeds) for _, seeds in others):,} seeds")
        return f"{self.key}: {'; '.join(said)}"

    def as_dict(self) -> dict:
        values = [{"value": value, "seeds": seeds} for value, seeds in self.values.items()]
        return {"key": self.key, "changes_sums": self.changes_sums, "values": values}


@dataclass(frozen=True)
class Notice:
    """What a reader has to be told: what changes the sums, what does not, and what follows."""

    loud: list[str]
    quiet: list[str]
    heading: str
    why: str


def differences(environments: Mapping[int, Mapping]) -> list[Difference]:
    """What is not the same in all, of seed -> ``environment``; what changes the sums comes first.

    What some do not record, since an earlier driftlab wrote them, is told apart among the others alone.
    """
    flat = {seed: _flat(environment) for seed, environment in sorted(environments.items())}
    found = []
    for key in dict.fromkeys(chain.from_iterable(flat.values())):
        values: dict[str, list[int]] = {}
        for seed, entries in flat.items():
            values.setdefault(entries.get(key, _NOT_RECORDED), []).append(seed)
        if len(values.keys() - {_NOT_RECORDED}) > 1:
            found.append(Difference(key, values, _changes_sums(key, flat.values())))
    return sorted(found, key=lambda difference: not difference.changes_sums)


def elsewhere(before: Mapping, now: Mapping) -> bool:
    """Whether two environments differ in anything that both record."""
    return bool(differences({0: before, 1: now}))


def moved_seeds(runs: Mapping[int, Mapping]) -> list[Difference]:
    """Of seeds that went on elsewhere: what differed, as value before and after -> in which seeds.

    Args:
        runs: seed -> ``run.json``; its ``resumed`` lists the earlier parts that ran elsewhere.
    """
    found: dict[str, tuple[bool, dict[str, list[int]]]] = {}
    for seed, run in sorted(runs.items()):
        after = _flat(_environment(run))
        for before in _earlier_parts(run):
            for key in (key for key in before if before[key] != after.get(key, before[key])):
                _, values = found.setdefault(key, (_changes_sums(key, (before, after)), {}))
                seeds = values.setdefault(f"{before[key]}, then {after[key]}", [])
                seeds += [seed] if seed not in seeds[-1:] else []
    differing = [Difference(key, values, sums) for key, (sums, values) in found.items()]
    return sorted(differing, key=lambda difference: not difference.changes_sums)


def notice(runs: Mapping[int, Mapping]) -> Notice | None:
    """Of seed -> ``run.json``; None where every seed ran in the same environment from its first step on."""
    apart = differences({seed: _environment(run) for seed, run in runs.items()})
    moved = moved_seeds(runs)
    said = [(d, str(d)) for d in apart] + [(d, f"resumed elsewhere: {d}") for d in moved]
    if not said:
        return None
    loud, quiet = ([text for d, text in said if d.changes_sums is sums] for sums in (True, False))
    reasons = [why for found, why in ((apart, WHY_APART), (moved, WHY_MOVED)) if _any_sums(found)]
    return Notice(loud, quiet, APART if _any_sums(apart) else MOVED, " ".join(reasons))


def _any_sums(found: Iterable[Difference]) -> bool:
    return any(difference.changes_sums for difference in found)


def lines(runs: Mapping[int, Mapping]) -> list[str]:
    """For a terminal or a log: a line a difference, and why it matters; empty where there is none."""
    found = notice(runs)
    if found is None:
        return []
    loud = [found.heading, *(f"  {line}" for line in found.loud), found.why] if found.loud else []
    return loud + [f"not the same in all seeds, without effect on sums: {line}" for line in found.quiet]


def seeds_text(seeds: list[int]) -> str:
    """For a reader, "seed 3" or "seeds 0..4, 7"; of many ranges the first, and how many seeds there are."""
    ranges: list[list[int]] = []
    for seed in seeds:
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    texts = [f"{a}..{b}" if b > a + 1 else f"{a}, {b}" if b > a else f"{a}" for a, b in ranges]
    if len(texts) > _MOST_RANGES:
        return f"seeds {', '.join(texts[:_MOST_RANGES])}, … ({len(seeds):,} seeds)"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(texts)}"


def _environment(run: Mapping) -> Mapping:
    """Of a record that others made, maybe without one."""
    found = run.get("environment")
    return found if isinstance(found, Mapping) else {}


def _earlier_parts(run: Mapping) -> Iterable[dict[str, str]]:
    parts = run.get("resumed")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping):
            yield _flat(_environment(part))


def _changes_sums(key: str, environments: Iterable[Mapping[str, str]]) -> bool:
    if key == "threads":  # of the processor: a GPU's sums do not know them
        return any(e.get("device", "cpu").startswith("cpu") for e in environments)
    return key in _VERSIONS_THAT_SUM or not key.startswith(_QUIET)


def _flat(values: Mapping, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as text."""
    found = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
