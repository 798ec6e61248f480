"""The sentences of the answer, made of what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.questions.one_bit.intervals import Estimate
from experiments.questions.one_bit.summary import (
    PUBLISHED,
    THEIR_EPOCHS,
    Summary,
    disagreement_ratio,
)


def sentence(found: Mapping[str, Summary], epochs: float) -> str:
    """The answer: one bit beside all sources, the split beside one bit, nothing varied, what limits it."""
    ulp, split, everything = (found[k] for k in ("one_ulp", "split", "all"))
    if any(s.disagreement.value is None for s in (ulp, split, everything)):
        return f"There are no two finished runs to compare: run more seeds. {of_nothing(found)}".strip()
    if everything.disagreement.value == 0:
        return "There is nothing to compare: not even all three sources together change a prediction."
    parts = [
        f"{_verdict(ulp)}: two runs that differ in one bit of one weight disagree on "
        f"{percent(ulp.disagreement)} of the test images, two that share neither initial weights, order nor "
        f"augmentation on {percent(everything.disagreement)}{_as_ratio(ulp.over_all)}.",
        _of_split(split, ulp),
        of_nothing(found),
        _of_blown_up(found),
        _limits(found, epochs),
    ]
    return " ".join(part for part in parts if part)


def _as_ratio(found: Estimate) -> str:
    return f"; the first is {times(found)} the second" if found.value else ""


def _verdict(ulp: Summary) -> str:
    if ulp.disagreement.value == 0:
        return "No"
    if ulp.told_apart is None:
        return "Too few runs to say"
    if not ulp.told_apart:
        return "Yes, as far as these runs can tell"
    return "Not quite" if ulp.over_all.high < 1 else "Yes, and more"


def _of_split(split: Summary, ulp: Summary) -> str:
    ratio = disagreement_ratio(split.runs, ulp.runs)
    opening = f"A right rewrite, convs split by chance, gives {percent(split.disagreement)}"
    if not ratio.bounded:
        return f"{opening}."
    if ratio.low > 1:
        said = "more than one bit"
    elif ratio.high < 1:
        said = "less than one bit"
    else:
        said = "the same as one bit, as far as these runs can tell"
    return f"{opening}, {said} ({times(ratio)})."


def of_nothing(found: Mapping[str, Summary]) -> str:
    """What the runs with nothing varied say."""
    nothing = found["nothing"].runs
    if nothing.n < 2:
        return ""
    disagreement = found["nothing"].disagreement.value
    if nothing.endings == 1:
        return f"With nothing varied all {nothing.n} runs end at the same weights, bit for bit."
    return (
        f"With nothing varied {nothing.n} runs end at {nothing.endings} different weights and disagree on "
        f"{disagreement:.1f} %: something else varies, so no row is about its source alone."
    )


def _of_blown_up(found: Mapping[str, Summary]) -> str:
    lost = {s.row.name: len(s.runs.blown_up) for s in found.values() if s.runs.blown_up}
    if not lost:
        return ""
    counts = ", ".join(f"{name} {count}" for name, count in lost.items())
    return f"Left out, because the training blew up: {counts}."


def _limits(found: Mapping[str, Summary], epochs: float) -> str:
    """What keeps the numbers from those that were published."""
    everything = found["all"]
    said = (
        f"Published, of networks trained for {THEIR_EPOCHS} epochs: {PUBLISHED['one_ulp'].disagreement:g} % "
        f"and {PUBLISHED['all'].disagreement:g} %; these trained for {epochs:.3g}, to "
        f"{everything.accuracy:.0f} % accuracy (where more is wrong, more can differ)"
    )
    known = everything.spread
    if not known.bounded or not known.low:
        return f"{said}."
    factor = math.sqrt(known.high / known.low)
    return f"{said}, and {everything.runs.n} runs tell an accuracy SD to a factor of {factor:.1f} only."


def percent(found: Estimate, digits: int = 1) -> str:
    """ "31.2 % (30.5 to 31.9)"."""
    return f"{found.value:.{digits}f} %" + between(found, digits)


def times(found: Estimate) -> str:
    """ "0.981 times (0.952 to 1.012)"."""
    return f"{found.value:.3f} times" + between(found, 3)


def between(found: Estimate, digits: int) -> str:
    """The interval behind a number, where there is one and its ends differ in these digits."""
    if not found.bounded:
        return ""
    low, high = (f"{end:.{digits}f}" for end in (found.low, found.high))
    return f" ({low} to {high})" if low != high else ""
