"""Paired outcomes over seeds."""

from __future__ import annotations

from collections.abc import Sequence


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The two-sided p-value of McNemar's exact test on paired yes/no outcomes.

    Only the pairs that disagree count: if both have the same chance, each is as likely to be the one.
    1.0 where no pair disagrees. (McNemar, Psychometrika 12, 1947; exact form: binomial with p = 1/2.)
    """
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    discordant = only_first + only_second
    if not discordant:
        return 1.0
    from scipy.stats import binomtest  # takes a second to import, and most runs have no pair that disagrees

    return float(binomtest(only_first, discordant, 0.5).pvalue)
