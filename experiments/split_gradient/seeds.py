"""What the seeds say together, by dtype and pass: their spread, who is nearer to exact, what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from statistics import median

from driftlab.verdict.statistics import mcnemar_exact
from experiments.split_gradient.case import Case
from experiments.split_gradient.literal import DTYPES, FULL_FLOAT64
from experiments.split_gradient.passes import PASSES
from suite.showing.wording import Rows, Values, each, grouped

# Dtype and pass -> the rows of the seeds that computed it, as ``measure_literal`` leaves them, with the seed.
Groups = Mapping[tuple[str, str], Rows]
# The case of the thread, for which there is a prediction.
AS_ASKED = Case(in_channels=2, out_channels=513, kernel_size=2, split=(1, 512), batch=1, image_size=3)
# Largest absolute differences, least and greatest over seeds and devices, as predicted.
_EXPECTED = {
    ("float32", "weight gradient"): (0.0, 2.4e-7),
    ("float32", "input gradient"): (2e-6, 4e-6),
    ("bfloat16", "input gradient"): (0.06, 0.13),
    **{(d, p): (0.0, 1e-14) for d in ("float64", FULL_FLOAT64) for p in PASSES[1:]},
    **{(d, "forward"): (0.0, 0.0) for d in DTYPES},
}
_ITS_DIGITS = 0.05  # they are stated with one digit or two
FAMILY_ERROR = 0.05  # chance that any of the comparisons with the exact result is called a difference by luck


def with_seeds(values: Values, *path: str) -> list[dict]:
    """The rows of all seeds, each with its seed."""
    found = zip(values, each(values, *path), strict=True)
    return [row | {"seed": seed} for seed, rows in found for row in rows]


def groups(values: Values) -> Groups:
    found = grouped(with_seeds(values, "literal", "rows"), "dtype", "pass")
    return {key: found[key] for key in product(DTYPES, PASSES) if key in found}


def named(rows: Rows) -> str:
    return f"{rows[0]['dtype']} {rows[0]['pass']}"


def differing(rows: Rows) -> int:
    return sum(row["difference"] > 0 for row in rows)


def expected(rows: Rows, case: Case) -> tuple[float, float] | None:
    return _EXPECTED.get((rows[0]["dtype"], rows[0]["pass"])) if case == AS_ASKED else None


def not_as_stated(rows: Rows, case: Case) -> Rows:
    """The rows outside of what was predicted, where anything was."""
    stated = expected(rows, case)
    if stated is None:
        return []
    low, high = stated[0] * (1 - _ITS_DIGITS), stated[1] * (1 + _ITS_DIGITS)
    return [row for row in rows if not low <= row["difference"] <= high]


def missing(values: Values) -> dict[str, list[str]]:
    """The dtypes that the device does not compute, with the reason in each seed that it does not."""
    found: dict[str, list[str]] = {}
    for lacking in each(values, "literal", "missing"):
        for name, why in lacking.items():
            found.setdefault(name, []).append(why)
    return found


def nearer(rows: Rows) -> tuple[int, int]:
    """Seeds in which the split, and in which the original, is nearer to the exact result (rms)."""
    split, original = _is_nearer(rows)
    return sum(split), sum(original)


def _is_nearer(rows: Rows) -> tuple[list[bool], list[bool]]:
    pairs = [(row["rms_split"], row["rms_whole"]) for row in rows]
    return [s < w for s, w in pairs], [w < s for s, w in pairs]


def sign_test(rows: Rows) -> float:
    """Two-sided p-value that either is nearer as often as the other; equal ones left out."""
    return mcnemar_exact(*_is_nearer(rows))


def rms_ratio(rows: Rows) -> float | None:
    """The split's error over the original's (rms), the median over the seeds that have one."""
    ratios = [row["rms_split"] / row["rms_whole"] for row in rows if row["rms_whole"] > 0]
    return median(ratios) if ratios else None


def one_side_nearer(found: Groups) -> list[Rows]:
    """Where one of the two is nearer to the exact result by more than luck, over all comparisons."""
    asked = [g for g in found.values() if sum(nearer(g))]
    return [g for g in asked if sign_test(g) <= FAMILY_ERROR / len(asked)]  # Bonferroni


def seeds_needed(found: Groups) -> int:
    """How many seeds have to agree before ``one_side_nearer`` can say anything."""
    asked = sum(sum(nearer(g)) > 0 for g in found.values())
    return 1 + math.ceil(math.log2(max(asked, 1) / FAMILY_ERROR))


def ratios(wide: Rows, narrow: Rows) -> list[float]:
    """The difference in one dtype over that in another, seed by seed, where the latter is not 0."""
    other = {row["seed"]: row["difference"] for row in narrow if row["difference"] > 0}
    return [row["difference"] / other[row["seed"]] for row in wide if row["seed"] in other]


def integers_equal(values: Values) -> bool | None:
    """None where the original itself is not exact on integers, and nothing else says that they differ."""
    said = [equal for passes in each(values, "integers") for equal in passes.values()]
    return False if False in said else None if None in said else True
