"""The numbers of a row: its spread and its pairs, with their intervals, beside those that were published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from experiments.questions.one_bit.intervals import Estimate, mean_of_pairs, ratio_of_pairs, spread
from experiments.questions.one_bit.pairs import Runs, runs_of
from experiments.questions.one_bit.rows import ROWS, Row


class Published(NamedTuple):
    """Accuracy SD (points), disagreement (%), correlation: Summers and Dinneen (ICML 2021)."""

    spread: float
    disagreement: float
    correlation: float


PUBLISHED = {"one_ulp": Published(0.21, 10.6, 0.874), "all": Published(0.26, 10.7, 0.871)}
THEIR_EPOCHS, THEIR_RUNS = 500, 100


@dataclass(frozen=True)
class Summary:
    """One row of the table; ``over_all`` is its disagreement over that of all sources together."""

    key: str
    runs: Runs
    spread: Estimate
    disagreement: Estimate
    correlation: Estimate
    gain: Estimate
    over_all: Estimate

    @property
    def row(self) -> Row:
        return ROWS[self.key]

    @property
    def accuracy(self) -> float | None:
        """Mean over the runs, percent."""
        return float(self.runs.accuracies.mean()) if self.runs.n else None

    @property
    def told_apart(self) -> bool | None:
        """Whether its disagreement differs from that of all sources; None where that cannot be said."""
        if not self.over_all.bounded:
            return None
        return not self.over_all.low <= 1 <= self.over_all.high


def summaries(values: Mapping[int, dict]) -> dict[str, Summary]:
    """Every row of ``ROWS`` over all seeds."""
    runs = {key: runs_of(values, key) for key in ROWS}
    return {
        key: Summary(
            key,
            own,
            spread(own.accuracies),
            mean_of_pairs(own.disagreements, 0, 100),
            mean_of_pairs(own.correlations, -1, 1),
            mean_of_pairs(own.gains),
            disagreement_ratio(own, runs["all"]),
        )
        for key, own in runs.items()
    }


def disagreement_ratio(first: Runs, second: Runs) -> Estimate:
    """Mean disagreement of the pairs of one row over that of another."""
    return ratio_of_pairs(first.disagreements, second.disagreements, first.seeds, second.seeds)
