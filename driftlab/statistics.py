"""Paired outcomes over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev


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


def equal_means(differences: Sequence[float], margin: float) -> float:
    """The p-value of two one-sided t-tests that the mean of paired ``differences`` is within +-``margin``.

    Small values speak for equality, which a large p-value of an ordinary test does not (Schuirmann, "A
    comparison of the two one-sided tests procedure and the power approach", J. Pharmacokin. Biopharm. 15,
    1987). 1 for fewer than three differences; 0 where they are all the same and within the margin.
    """
    n = len(differences)
    if n < 3 or margin <= 0:
        return 1.0
    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return 0.0 if abs(mean) < margin else 1.0
    from scipy.special import stdtr  # Student's t; scipy.stats, which has it too, takes two seconds to import

    error = spread / n**0.5
    return float(max(stdtr(n - 1, -(mean + margin) / error), stdtr(n - 1, (mean - margin) / error)))
