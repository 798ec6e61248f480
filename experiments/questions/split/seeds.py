"""What the seeds say together: the rows of every dtype and pass, their spread, and who is nearer to exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from driftlab.statistics import mcnemar_exact
from experiments.questions.split.case import Case
from experiments.questions.split.literal import DTYPES, FULL_FLOAT64
from experiments.questions.split.passes import PASSES

Values = Mapping[int, dict]
# The case of the thread, for which the issue states what to expect.
AS_ASKED = Case(in_channels=2, out_channels=513, kernel_size=2, split=(1, 512), batch=1, image_size=3)
# Largest absolute differences, least and greatest over seeds and devices, as the issue states them.
_EXPECTED = {
    ("float32", "weight gradient"): (0.0, 2.4e-7),
    ("float32", "input gradient"): (2e-6, 4e-6),
    ("bfloat16", "input gradient"): (0.06, 0.13),
    **{(d, p): (0.0, 1e-14) for d in ("float64", FULL_FLOAT64) for p in PASSES[1:]},
    **{(d, "forward"): (0.0, 0.0) for d in DTYPES},
}
_ITS_DIGITS = 0.05  # they are stated with one digit or two
FAMILY_ERROR = 0.05  # chance that any of the comparisons with the exact result is called a difference by luck


@dataclass(frozen=True)
class Group:
    """One dtype and pass: seed -> row, as ``measure_literal`` leaves it, where the device computed it."""

    dtype: str
    pass_: str
    by_seed: Mapping[int, dict]

    @property
    def rows(self) -> list[dict]:
        return list(self.by_seed.values())

    @property
    def n(self) -> int:
        return len(self.rows)

    def all(self, key: str) -> list[float]:
        return [row[key] for row in self.rows]

    def largest(self, key: str) -> float:
        return max(self.all(key))

    def least(self, key: str) -> float:
        return min(self.all(key))

    def median(self, key: str) -> float:
        return median(self.all(key))

    @property
    def differing(self) -> int:
        return sum(row["difference"] > 0 for row in self.rows)

    @property
    def nearer(self) -> tuple[int, int]:
        """Seeds in which the split, and in which the original, is nearer to the exact result (rms)."""
        pairs = [(row["rms_split"], row["rms_whole"]) for row in self.rows]
        return sum(s < w for s, w in pairs), sum(w < s for s, w in pairs)

    @property
    def sign_test(self) -> float:
        """Two-sided p-value that either is nearer as often as the other; equal ones left out."""
        pairs = [(row["rms_split"], row["rms_whole"]) for row in self.rows]
        return mcnemar_exact([s < w for s, w in pairs], [w < s for s, w in pairs])

    @property
    def rms_ratio(self) -> float | None:
        """The split's error over the original's (rms), the median over the seeds that have one."""
        ratios = [row["rms_split"] / row["rms_whole"] for row in self.rows if row["rms_whole"] > 0]
        return median(ratios) if ratios else None

    def expected(self, case: Case) -> tuple[float, float] | None:
        return _EXPECTED.get((self.dtype, self.pass_)) if case == AS_ASKED else None

    def unexpected(self, case: Case) -> list[dict]:
        """The rows outside of what the issue states, if it does."""
        stated = self.expected(case)
        if stated is None:
            return []
        low, high = stated[0] * (1 - _ITS_DIGITS), stated[1] * (1 + _ITS_DIGITS)
        return [row for row in self.rows if not low <= row["difference"] <= high]


def groups(values: Values) -> dict[tuple[str, str], Group]:
    """By dtype and pass, in the order of the tables."""
    found = {}
    for dtype in DTYPES:
        for pass_ in PASSES:
            rows = ((seed, r) for seed, v in values.items() for r in v["literal"]["rows"])
            of_both = {seed: r for seed, r in rows if (r["dtype"], r["pass"]) == (dtype, pass_)}
            if of_both:
                found[dtype, pass_] = Group(dtype, pass_, of_both)
    return found


def missing(values: Values) -> dict[str, list[str]]:
    """The dtypes that the device does not compute, with the reason in each seed that it does not."""
    found: dict[str, list[str]] = {}
    for v in values.values():
        for name, why in v["literal"]["missing"].items():
            found.setdefault(name, []).append(why)
    return found


def one_side_nearer(found: Mapping[tuple[str, str], Group]) -> list[Group]:
    """Where one of the two is nearer to the exact result by more than luck, over all comparisons."""
    asked = [g for g in found.values() if sum(g.nearer)]
    return [g for g in asked if g.sign_test <= FAMILY_ERROR / len(asked)]  # Bonferroni


def seeds_needed(found: Mapping[tuple[str, str], Group]) -> int:
    """How many seeds have to agree before ``one_side_nearer`` can say anything."""
    asked = sum(sum(g.nearer) > 0 for g in found.values())
    return 1 + math.ceil(math.log2(max(asked, 1) / FAMILY_ERROR))


def ratios(wide: Group, narrow: Group) -> list[float]:
    """The difference in one dtype over that in another, seed by seed, where the latter is not 0."""
    both = [(wide.by_seed[seed], row) for seed, row in narrow.by_seed.items() if seed in wide.by_seed]
    return [w["difference"] / n["difference"] for w, n in both if n["difference"] > 0]


def integers_equal(values: Values) -> bool | None:
    """None where the original itself is not exact on integers, and nothing else says that they differ."""
    said = [equal for v in values.values() for equal in v["integers"].values()]
    return False if False in said else None if None in said else True


def seeds_in_words(n: int) -> str:
    return f"{n} seed{'s' * (n > 1)}"
