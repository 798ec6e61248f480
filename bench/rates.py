"""How many of how many, with the interval: as text on a page, as numbers in ``rates.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from driftlab.verdict.statistics import clopper_pearson

COLUMNS = ("when", "cases", "by", "measure", "count", "n", "value", "low", "high")
TODAY, FIRST = "today", "at first sight"


@dataclass(frozen=True)
class Rate:
    """A count out of ``n``.

    Attributes:
        when: ``TODAY``, or ``FIRST``: as it was when the cases were judged for the first time.
        cases: which of them.
        by: who judged.
        measure: what was counted.
    """

    when: str
    cases: str
    by: str
    measure: str
    count: int
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, Clopper and Pearson's, as shares."""
        return clopper_pearson(self.count, self.n)

    def __str__(self) -> str:
        if not self.n:
            return f"{self.count:,} of {self.n:,}"
        share, low, high = (100 * share for share in (self.count / self.n, *self.interval))
        return f"{self.count:,} of {self.n:,} ({share:.1f} %; {low:.1f} to {high:.1f})"


def rates_csv(rates: Iterable[Rate]) -> str:
    """A row a rate; ``value``, ``low`` and ``high`` are shares, empty where n is 0."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for r in rates:
        shares = (r.count / r.n, *r.interval) if r.n else ("", "", "")
        rows.writerow((r.when, r.cases, r.by, r.measure, r.count, r.n, *shares))
    return text.getvalue()
