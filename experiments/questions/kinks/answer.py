"""The answer: whether drift leaps at kinks, what it does without, and whether the flips can be predicted."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from experiments.questions.kinks.figures import figure
from experiments.questions.kinks.seeds import GROUPS, by_network, ends, extremes, leap_ratios, leaps, steps_of
from experiments.questions.kinks.series import HALFWAY_FLIPS, MANY, Values, first_flip, quiet_ratio
from experiments.questions.kinks.tables import drift_table, end_ratio, flip_table


def answer(settings: DictConfig, values: Values) -> Answer:
    """Everything that the seeds show; at least one."""
    return Answer(_sentence(values), [drift_table(values), flip_table(values)], [figure(values)])


def _sentence(values: Values) -> str:
    kinked, smooth = extremes(values)
    said = [
        _leap_words(values, kinked, smooth) if kinked else "",
        _others_words(values, kinked, smooth) if kinked else "",
        _smooth_words(values, smooth) if smooth else "",
        _law_words(values),
    ]
    return " ".join(s for s in said if s)


def _leap_words(values: Values, name: str, smooth: str | None) -> str:
    """How drift grows up to the first flip and from there on, and whether that is a leap."""
    networks = by_network(values)[name]
    flipped = sum(first_flip(n) is not None for n in networks.values())
    if not flipped:
        return f"{name}: nothing flipped in {len(networks)} runs, so nothing can be said about leaps."
    found, leaping = leaps(values, name), leaps_at_flip(values, name, smooth)
    if leaping is None:
        return f"{name}: {flipped} of {len(networks)} runs flipped, too late or too early to see a leap."
    before = f"{median(found['before']):.2g} times a step before and " if found["before"] else ""
    return (
        f"{name}: float32 drift {'leaps' if leaping else 'does not leap'} at the first flip. It grows "
        f"{before}{median(found['after']):.2g} times a step after it; float64 drift, of the same network at "
        f"the same steps, {median(found['float64']):.2g} times."
    )


def leaps_at_flip(values: Values, name: str, smooth: str | None) -> bool | None:
    """Whether drift outgrows that in float64 by more than any network without kinks at the same steps.

    The median over seeds against the largest of the others; where there is no network without kinks,
    against equal growth. None where it cannot be told.
    """
    found = leap_ratios(values, name)
    without = leap_ratios(values, smooth) if smooth else []
    return median(found) > max([1.0, *without]) if found else None


def _others_words(values: Values, kinked: str, smooth: str | None) -> str:
    """The networks with fewer kinks."""
    said: dict[bool, list[str]] = {True: [], False: []}
    for name, networks in by_network(values).items():
        flips = any(first_flip(n) is not None for n in networks.values())
        leaping = leaps_at_flip(values, name, smooth) if flips and name != kinked else None
        if leaping is not None:
            said[leaping].append(f"{name} ({median(leaps(values, name)['after']):.2g} times)")
    listed = [f"{w}: {', '.join(said[k])}." for k, w in ((True, "So does"), (False, "No leap")) if said[k]]
    return " ".join(listed)


def _smooth_words(values: Values, name: str) -> str:
    """What drift does without kinks: the ratio of the dtypes, and how far it gets all the same."""
    networks = by_network(values)[name].values()
    quiet = [r for n in networks if (r := quiet_ratio(n)) is not None]
    last = [r for n in networks if (r := end_ratio(n)) is not None]
    found = leaps(values, name)["after"]
    if not quiet or not last:
        return ""
    over = f"{median(found):.2g} times a step over the same steps; " if found else ""
    return (
        f"Without kinks ({name}): {over}float64 drift is 2^{median(quiet):.1f} of float32 drift (2^-29 is "
        f"rounding alone), 2^{median(last):.1f} at the last step, where float32 drift has come to "
        f"{median(ends(networks, 'float32')):.1g}{_against_kinked(values, name)}."
    )


def _against_kinked(values: Values, smooth: str) -> str:
    kinked = extremes(values)[0]
    found = ends(by_network(values)[kinked].values(), "float32") if kinked else []
    return f" ({kinked}: {median(found):.1g})" if found else ""


def _law_words(values: Values) -> str:
    steps = [s for label in GROUPS for s in steps_of(values, label) if s.near >= MANY and not s.saturated]
    ratios = [s.counted / s.near for s in steps]
    if not ratios:
        return "Too few changes were predicted in any step to hold the prediction against the count."
    middle = median(ratios)
    right = 1 / HALFWAY_FLIPS <= middle <= HALFWAY_FLIPS
    return (
        f"The number of flips {'can be' if right else 'cannot be'} predicted: number x density at 0 x "
        f"perturbation is {1 / middle:.2f} times the count (median of {len(ratios):,} steps)."
    )
