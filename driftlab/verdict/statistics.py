"""Statistics of few seeds: exact tests and intervals, paired where the outcomes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean, stdev
from typing import TypeVar

Key = TypeVar("Key")


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The two-sided p-value of McNemar's exact test on paired yes/no outcomes.

    Only the pairs that disagree count: if both have the same chance, each is as likely to be the one.
    1.0 where no pair disagrees. (McNemar, Psychometrika 12, 1947; exact form: binomial with p = 1/2.)
    """
    sides = [a for a, b in zip(first, second, strict=True) if a != b]
    n, fewer = len(sides), min(sum(sides), len(sides) - sum(sides))
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / (1 << n))


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


def sign_flip_test(sides: Sequence[int]) -> float:
    """The two-sided p-value that ``sides`` lie around 0 by chance; 1.0 where all are 0.

    Where both networks of a pair are the same to their seed, exchanging them turns the sign of the seed's
    number and nothing else. So each of the 2^n patterns of signs is as likely, and p is the share of them
    whose sum is as far from 0 as the one seen, or farther (Fisher, "The design of experiments", 1935).
    """
    sums = {0: 1}
    for side in sides:
        grown: dict[int, int] = {}
        for total, ways in sums.items():
            for turned in (total + side, total - side):
                grown[turned] = grown.get(turned, 0) + ways
        sums = grown
    seen = abs(sum(sides))
    return sum(ways for total, ways in sums.items() if abs(total) >= seen) / sum(sums.values())


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """The p-values, corrected for being several (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected, largest = {}, 0.0
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[key] = largest
    return {key: corrected[key] for key in p_values}


def clopper_pearson(count: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share of which ``count`` of ``n`` were seen (Biometrika 26, 1934)."""
    from scipy.special import betaincinv  # scipy.stats, which has it too, takes two seconds to import

    tail = (1 - level) / 2
    low = float(betaincinv(count, n - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 1 - tail)) if count < n else 1.0
    return low, high
