"""Which runs diverged, from what the seeds measured: counts by rate, pairs with the reference, tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from statistics import median
from typing import NamedTuple

from driftlab.verdict.outcomes import SIGNIFICANT, ended_above
from driftlab.verdict.statistics import holm, mcnemar_exact, sign_flip_test
from suite.showing.wording import Values, all_rows

REFERENCE = "reference"
COMPARED = ("control", "candidate", "bug")
ARMS = (REFERENCE, *COMPARED)


def fell(run: Mapping) -> bool:
    """As ``driftlab.verdict.outcomes``: NaN or inf, or an end at more than twice the loss at first."""
    return run["blown_up_at"] is not None or ended_above(run["first"], run["tail"])


def rates(values: Values) -> list[float]:
    """In rising order."""
    return sorted({run["rate"] for run in all_rows(values, "runs")})


def runs(values: Values, arm: str, rate: float) -> dict[int, dict]:
    """By seed."""
    return {
        seed: run
        for seed, v in values.items()
        for run in v["runs"]
        if (run["arm"], run["rate"]) == (arm, rate)
    }


class Pairs(NamedTuple):
    """In how many seeds one arm and the reference diverged at one learning rate, and McNemar's exact p."""

    neither: int
    only_arm: int
    only_reference: int
    both: int
    p: float

    @property
    def n(self) -> int:
        return sum(self[:4])

    @property
    def fallen(self) -> int:
        return self.only_arm + self.both

    @property
    def reference_fallen(self) -> int:
        return self.only_reference + self.both

    @property
    def differing(self) -> int:
        return self.only_reference + self.only_arm


def paired(values: Values, arm: str, rate: float) -> Pairs:
    reference, other = runs(values, REFERENCE, rate), runs(values, arm, rate)
    found = [(fell(reference[seed]), fell(other[seed])) for seed in reference if seed in other]
    counts = [found.count(pair) for pair in product((False, True), repeat=2)]
    return Pairs(*counts, mcnemar_exact([a for a, _ in found], [b for _, b in found]))


def sides(of_seed: list[Mapping], arm: str) -> list[int]:
    """Rate by rate: 1 where the arm alone diverged, -1 where the reference alone did, else 0."""
    by_arm = {(run["arm"], run["rate"]): fell(run) for run in of_seed}
    return [f - by_arm[REFERENCE, rate] for (name, rate), f in by_arm.items() if name == arm]


def net(values: Values, arm: str) -> list[int]:
    """Seed by seed: at how many rates the arm alone diverged, less at how many the reference alone did."""
    return [sum(sides(v["runs"], arm)) for v in values.values()]


def differing(of_seed: list[Mapping], arm: str) -> int:
    """At how many rates one of the two diverged and the other did not."""
    return sum(map(abs, sides(of_seed, arm)))


def told(values: Values) -> dict[str, float]:
    """For each arm the p-value that it diverges as the reference does, over all rates.

    The unit is the seed, since the runs of one seed at several rates are not independent; corrected for the
    three arms by Holm's way.
    """
    return holm({arm: sign_flip_test(net(values, arm)) for arm in COMPARED})


def told_by_rate(values: Values) -> dict[tuple[str, float], float]:
    """McNemar's exact p for each arm and rate, corrected for all of them by Holm's way."""
    return holm({(arm, rate): paired(values, arm, rate).p for arm in COMPARED for rate in rates(values)})


def is_told(p: float) -> bool:
    return p < SIGNIFICANT


def edge(values: Values) -> list[float]:
    """The rates at which control and reference, which differ by one ulp, end differently in some seed."""
    return [rate for rate in rates(values) if paired(values, "control", rate).differing]


def middle(values: Values) -> float:
    """The rate at which the reference diverges nearest to half of the seeds; the lowest of equals.

    Chosen by the reference alone, so that what the others do there was not selected.
    """

    def off(rate: float) -> float:
        found = runs(values, REFERENCE, rate).values()
        return abs(sum(map(fell, found)) / len(found) - 0.5)

    return min(rates(values), key=off)


def learned(values: Values, arm: str, rate: float) -> int:
    """In how many seeds an arm ended below the loss that it began with."""
    found = runs(values, arm, rate).values()
    return sum((end := final_loss(run)) is not None and end < run["first"] for run in found)


def at_end(values: Values, arm: str, rate: float, of: Callable[[Mapping], float | None]) -> float | None:
    """The median over the seeds that have a value (an arm that blew up has none); None where none has."""
    found = [v for run in runs(values, arm, rate).values() if (v := of(run)) is not None]
    return median(found) if found else None


def final_loss(run: Mapping) -> float | None:
    return median(run["tail"]) if run["tail"] else None


def accused(values: Values, arm: str) -> int:
    """In how many seeds the probes call an arm a bug, before any update."""
    return sum(v["probes"][arm]["verdict"] == "bug" for v in values.values())
