"""Who fell over, from what the seeds measured: counts by learning rate, pairs with the reference, tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from driftlab.outcomes import SIGNIFICANT, ended_above
from driftlab.statistics import holm, mcnemar_exact, sign_flip_test

Values = Mapping[int, dict]
REFERENCE = "reference"
COMPARED = ("control", "candidate", "bug")
ARMS = (REFERENCE, *COMPARED)


def fell(run: Mapping) -> bool:
    """The rule of ``driftlab.outcomes``: NaN or inf, or an end at more than twice the loss at first."""
    return run["blown_up_at"] is not None or ended_above(run["first"], run["tail"])


def rates(values: Values) -> list[float]:
    """In rising order."""
    return sorted({run["rate"] for v in values.values() for run in v["runs"]})


def runs(values: Values, arm: str, rate: float) -> dict[int, dict]:
    """By seed."""
    return {
        seed: run
        for seed, v in values.items()
        for run in v["runs"]
        if (run["arm"], run["rate"]) == (arm, rate)
    }


@dataclass(frozen=True)
class Pairs:
    """The outcomes of one arm and of the reference at one learning rate, seed by seed.

    Attributes:
        reference, arm: whether each fell over, in the order of the seeds.
    """

    reference: tuple[bool, ...]
    arm: tuple[bool, ...]

    @property
    def n(self) -> int:
        return len(self.arm)

    @property
    def fallen(self) -> int:
        return sum(self.arm)

    @property
    def reference_fallen(self) -> int:
        return sum(self.reference)

    @property
    def neither(self) -> int:
        return self._count(False, False)

    @property
    def both(self) -> int:
        return self._count(True, True)

    @property
    def only_reference(self) -> int:
        return self._count(True, False)

    @property
    def only_arm(self) -> int:
        return self._count(False, True)

    @property
    def differing(self) -> int:
        return self.only_reference + self.only_arm

    @property
    def p(self) -> float:
        return mcnemar_exact(self.reference, self.arm)

    def _count(self, reference: bool, arm: bool) -> int:
        return sum(pair == (reference, arm) for pair in zip(self.reference, self.arm, strict=True))


def paired(values: Values, arm: str, rate: float) -> Pairs:
    mine, other = runs(values, REFERENCE, rate), runs(values, arm, rate)
    seeds = [s for s in mine if s in other]
    return Pairs(tuple(fell(mine[s]) for s in seeds), tuple(fell(other[s]) for s in seeds))


def sides(values: Values, arm: str) -> list[int]:
    """Seed by seed: at how many rates the arm alone fell over, less at how many the reference alone did."""
    return [side(v["runs"], arm) for v in values.values()]


def side(of_seed: list[Mapping], arm: str) -> int:
    by_arm = {(run["arm"], run["rate"]): fell(run) for run in of_seed}
    return sum(f - by_arm[REFERENCE, rate] for (name, rate), f in by_arm.items() if name == arm)


def differing(of_seed: list[Mapping], arm: str) -> int:
    """At how many rates one of the two fell over and the other did not."""
    by_arm = {(run["arm"], run["rate"]): fell(run) for run in of_seed}
    return sum(f != by_arm[REFERENCE, rate] for (name, rate), f in by_arm.items() if name == arm)


def told(values: Values) -> dict[str, float]:
    """For each arm the p-value that it falls over as the reference does, over all rates.

    The unit is the seed, since the runs of one seed at several rates are not independent; corrected for the
    three arms by Holm's way.
    """
    return holm({arm: sign_flip_test(sides(values, arm)) for arm in COMPARED})


def told_by_rate(values: Values) -> dict[tuple[str, float], float]:
    """McNemar's exact p for each arm and rate, corrected for all of them by Holm's way."""
    return holm({(arm, rate): paired(values, arm, rate).p for arm in COMPARED for rate in rates(values)})


def is_told(p: float) -> bool:
    return p < SIGNIFICANT


def edge(values: Values) -> list[float]:
    """The rates at which control and reference, one ulp apart, end differently in some seed."""
    return [rate for rate in rates(values) if paired(values, "control", rate).differing]


def middle(values: Values) -> float:
    """The rate at which the reference falls over nearest to half of the seeds; the lowest of equals.

    Chosen by the reference alone, so that what the others do there was not selected.
    """

    def off(rate: float) -> float:
        found = runs(values, REFERENCE, rate).values()
        return abs(sum(map(fell, found)) / len(found) - 0.5)

    return min(rates(values), key=off)


def learned(values: Values, arm: str, rate: float) -> int:
    """In how many seeds an arm ended below the loss that it began with."""
    found = runs(values, arm, rate).values()
    return sum(bool(run["tail"]) and median(run["tail"]) < run["first"] for run in found)


def final_loss(values: Values, arm: str, rate: float) -> float | None:
    """The median over the seeds that did not blow up; None where all did."""
    ends = [median(run["tail"]) for run in runs(values, arm, rate).values() if run["tail"]]
    return median(ends) if ends else None


def final_accuracy(values: Values, arm: str, rate: float) -> float | None:
    """On test images; as ``final_loss``."""
    found = [run["accuracy"] for run in runs(values, arm, rate).values() if run["accuracy"] is not None]
    return median(found) if found else None


def accused(values: Values, arm: str) -> int:
    """In how many seeds the probes call an arm a bug, before any update."""
    return sum(v["probes"][arm]["verdict"] == "bug" for v in values.values())
