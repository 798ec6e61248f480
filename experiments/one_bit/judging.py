"""The verdict: is the split the same function, and does it move a training further than one bit does?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.outcomes import SIGNIFICANT
from driftlab.verdict.rules import judge
from driftlab.words import Evidence, Judgement, Verdict
from experiments.one_bit.measure import APART, BASE_WEIGHTS
from suite.showing.wording import seeds

MOST_SIGNS = 16  # seeds up to which all 2^n signs are tried; above, so many by chance
DRAWS = 2**MOST_SIGNS


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """The usual rules on plain and split side by side, unless a training does not repeat itself or the split
    moves what it ends at further than one bit does.

    Disagreement saturates, so that it cannot clear a split by itself: a small bug ends as far away. It can
    only speak against what the first steps in both dtypes say.
    """
    judgement = judge([_without_own(r) for r in records])
    pairs = [(_own(r, f"{APART}_split"), _own(r, f"{APART}_one_ulp")) for r in records]
    found = further([(a.measured, b.measured) for a, b in pairs if a and b])
    again = repeated(records)
    judgement = replace(judgement, evidence=[*judgement.evidence, again, found])
    if again.supports:
        return replace(judgement, verdict=again.supports, headline=again.reading, where=None)
    if judgement.verdict is Verdict.ROUND_OFF and found.supports is Verdict.INCONCLUSIVE:
        headline = f"rounding by every probe, and yet {found.reading}: run more seeds"
        return replace(judgement, verdict=found.supports, headline=headline, where=None)
    return judgement


def _own(record: SeedRecord, name: str) -> Evidence | None:
    return next((f.evidence for f in record.found() if f.evidence.probe == name), None)


def _without_own(record: SeedRecord) -> SeedRecord:
    """The record less what is no probe of the pair."""
    own = (APART, BASE_WEIGHTS)
    return replace(record, findings=[f for f in record.found() if not f.evidence.probe.startswith(own)])


def repeated(records: Sequence[SeedRecord]) -> Evidence:
    """Do the runs with nothing varied end at the same weights, bit for bit, wherever kernels are the same?"""
    endings: dict[str, list[str]] = {}
    for record in records:
        if own := _own(record, BASE_WEIGHTS):
            environment = json.dumps(record.run.get("environment"), sort_keys=True)
            endings.setdefault(environment, []).append(own.reading)
    runs, kinds = (sum(len(of(e)) for e in endings.values()) for of in (list, set))
    more = kinds - len(endings)
    reading = f"{runs} runs with nothing varied end at " + (
        f"{kinds} different weights" if more else "the same weights, bit for bit"
    )
    if len(endings) > 1:
        reading += f" within each of {len(endings)} environments"
    question = "Does a training repeat itself where nothing is varied?"
    supports = Verdict.NONDETERMINISTIC if more else None
    return Evidence("nothing_varied", question, float(more), 0.0, supports, reading)


def further(pairs: Sequence[tuple[float | None, float | None]]) -> Evidence:
    """Is the split's run further from the plain one than a run with one moved weight? Paired by seed.

    If the split does nothing but round otherwise, either of the two is as likely to be the further one, so
    the signs of the differences are a coin each: an exact test (Fisher's, one-sided) that knows no other
    assumption. It turns at ``driftlab.verdict.outcomes.SIGNIFICANT``, 1 %, which takes at least seven seeds.
    """
    question = "Does the split move what a training ends at further than one bit in one weight does?"
    pairs = [pair for pair in pairs if None not in pair]
    if not pairs:
        reading = "not asked: no seed with both trainings finite"
        return Evidence("further_than_one_bit", question, None, SIGNIFICANT, None, reading)
    split, ulp = (float(np.mean(column)) for column in zip(*pairs, strict=True))
    p = sign_flip_test([a - b for a, b in pairs])
    reading = (
        f"the split changes the class of {100 * split:.1f} % of the test images, one ulp in one weight that "
        f"of {100 * ulp:.1f} % (means of {seeds(pairs)}; p = {p:.2g} that chance "
        "alone puts the split so far)"
    )
    supports = Verdict.INCONCLUSIVE if p < SIGNIFICANT else Verdict.ROUND_OFF
    return Evidence("further_than_one_bit", question, p, SIGNIFICANT, supports, reading)


def sign_flip_test(differences: Sequence[float]) -> float:
    """One-sided p: how often signs by chance make a sum of ``differences`` at least as large.

    Exact up to ``MOST_SIGNS`` differences, above that from ``DRAWS`` draws (R. A. Fisher, "The design of
    experiments", 1935; the draws counted with the observed one, so that p is never 0).
    """
    values = np.asarray(differences, dtype=np.float64)
    slack = 1e-12 * np.abs(values).sum()  # sums of the same numbers in another order are equal
    if len(values) <= MOST_SIGNS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
        return float((signs @ values >= values.sum() - slack).mean())
    signs = np.random.default_rng(0).choice((1.0, -1.0), size=(DRAWS, len(values)))
    return float((1 + (signs @ values >= values.sum() - slack).sum()) / (1 + DRAWS))
