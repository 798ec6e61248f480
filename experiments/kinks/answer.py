"""The answer: whether drift leaps at kinks, what it does without, and whether the flips can be predicted."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.kinks import series
from experiments.kinks.figures import figure
from experiments.kinks.tables import drift_table, end_ratio, flip_table
from suite.showing.wording import Values, sentences, two_digits


def answer(settings: DictConfig, values: Values) -> Answer:
    """Everything that the seeds show; at least one."""
    kinked, smooth = series.extremes(values)
    sentence = sentences(
        kinked and _leap_words(values, kinked, smooth),
        kinked and _others_words(values, kinked, smooth),
        smooth and _smooth_words(values, smooth, kinked),
        _law_words(values),
    )
    return Answer(sentence, [drift_table(values), flip_table(values)], [figure(values)])


def _flipped(values: Values, name: str) -> int:
    """In how many seeds anything flipped."""
    return len(series.known(map(series.first_flip, series.by_network(values)[name])))


def _leap_words(values: Values, name: str, smooth: str | None) -> str:
    """How drift grows up to the first flip and from there on, and whether that is a leap."""
    flipped, n = _flipped(values, name), len(series.by_network(values)[name])
    if not flipped:
        return f"{name}: nothing flipped in {n} runs, so nothing can be said about jumps."
    found, leaping = series.leaps(values, name), leaps_at_flip(values, name, smooth)
    if leaping is None:
        return f"{name}: {flipped} of {n} runs flipped, too late or too early to see a jump."
    before = f"{_median(found['before'])} times a step before and " if found["before"] else ""
    return (
        f"{name}: float32 drift {'jumps' if leaping else 'does not jump'} at the first flip. It grows "
        f"{before}{_median(found['after'])} times a step after it; float64 drift, of the same network at "
        f"the same steps, {_median(found['float64'])} times."
    )


def _median(found: list[float]) -> str:
    return two_digits(median(found))


def leaps_at_flip(values: Values, name: str, smooth: str | None) -> bool | None:
    """Whether drift outgrows that in float64 by more than any network without kinks at the same steps.

    The median over seeds against the largest of the others; where there is no network without kinks,
    against equal growth. None where it cannot be told.
    """
    found = series.leaps(values, name)["ratio"]
    without = series.leaps(values, smooth)["ratio"] if smooth else []
    return median(found) > max([1.0, *without]) if found else None


def _others_words(values: Values, kinked: str, smooth: str | None) -> str:
    """The networks with fewer kinks."""
    said: dict[bool, list[str]] = {True: [], False: []}
    for name in series.by_network(values):
        asked = name != kinked and _flipped(values, name)
        leaping = leaps_at_flip(values, name, smooth) if asked else None
        if leaping is not None:
            said[leaping].append(f"{name} ({_median(series.leaps(values, name)['after'])} times)")
    return sentences(
        *(f"{w}: {', '.join(said[k])}." for k, w in ((True, "So does"), (False, "No jump")) if said[k])
    )


def _smooth_words(values: Values, name: str, kinked: str | None) -> str:
    """What drift does without kinks: the ratio of the dtypes, and how far it gets all the same."""
    networks = series.by_network(values)
    quiet, last = (series.known(map(of, networks[name])) for of in (series.quiet_ratio, end_ratio))
    found = series.leaps(values, name)["after"]
    if not quiet or not last:
        return ""
    over = f"{_median(found)} times a step over the same steps; " if found else ""
    beside = series.ends(networks[kinked], "float32") if kinked else []
    return (
        f"Without kinks ({name}): {over}float64 drift is 2^{median(quiet):.1f} of float32 drift (2^-29 is "
        f"rounding alone), 2^{median(last):.1f} at the last step, where float32 drift has come to "
        f"{median(series.ends(networks[name], 'float32')):.1g}"
        f"{f' ({kinked}: {median(beside):.1g})' if beside else ''}."
    )


def _law_words(values: Values) -> str:
    steps = [s for s in series.many_predicted(values) if not s.saturated]
    if not steps:
        return "Too few changes were predicted in any step to hold the prediction against the count."
    middle = median(s.counted / s.near for s in steps)
    right = 1 / series.HALFWAY_FLIPS <= middle <= series.HALFWAY_FLIPS
    return (
        f"The number of flips {'can be' if right else 'cannot be'} predicted: number x density at 0 x "
        f"perturbation is {1 / middle:.2f} times the count (median of {len(steps):,} steps)."
    )
