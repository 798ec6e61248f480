"""The answer to the thread, with its tables and figures."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from driftlab.report.sections import Answer
from driftlab.rounding import HALFWAY_BITS
from experiments.split_gradient.case import read_case
from experiments.split_gradient.factors import bound_in_words, factors
from experiments.split_gradient.figures import literal_figure, sweep_figure
from experiments.split_gradient.laws import laws
from experiments.split_gradient.literal import FULL_FLOAT64
from experiments.split_gradient.passes import PASSES
from experiments.split_gradient.reasons import accuracy, accuracy_in_words, causes, why_input
from experiments.split_gradient.seeds import Groups, differing, groups, integers_equal, ratios
from experiments.split_gradient.tables import differences, dtype_ratios, scales
from suite.showing.wording import Rows, Values, all_rows, counted, each, numbers, seeds, sentences


def answer(settings: DictConfig, values: Values) -> Answer:
    """Everything that the seeds show; at least one."""
    case = read_case(settings.get("case"), "case")
    about_case = [differences(values, case), scales(values), dtype_ratios(values)]
    why = [accuracy(values), causes(values, case), factors(values), laws(values)]
    drawn = [literal_figure(values, case), sweep_figure(values)]
    return Answer(_sentence(values), about_case + why, drawn)


def _sentence(values: Values) -> str:
    found = groups(values)
    narrow = [found["float32", p] for p in PASSES]
    elsewhere = [f"{d} {p} differs." for (d, p), rows in found.items() if differing(rows)]
    return sentences(
        _what_it_is(values, found),
        f"float32, {seeds(values)}: {'; '.join(map(_pass_in_words, narrow))}.",
        *(() if any(map(differing, narrow)) else elsewhere),
        why_input(values) if differing(found["float32", "input gradient"]) else "",
        _shrinks(found),
        accuracy_in_words(found),
        _drifts(values),
        f"Sweep: {bound_in_words(all_rows(values, 'sweep'))}",
    )


def _what_it_is(values: Values, found: Groups) -> str:
    if not any(map(differing, found.values())):
        return "Nothing differs, in any bit."
    if integers_equal(values) is False:
        return "More than rounding: on integers, where no sum is rounded, original and split differ."
    share = max(numbers(all_rows(values, "literal", "rows"), "share"))
    if share > 1:
        return f"More than the order of a plain sum: up to {share:.2g} times what rounding may do."
    return (
        f"Rounding, no bug: no element differs by more than {share:.2g} of what rounding can make of its sum."
    )


def _pass_in_words(rows: Rows) -> str:
    name, apart = rows[0]["pass"], numbers(rows, "difference")
    if not differing(rows):
        return f"{name} equal bit for bit"
    far = f"{max(apart):.2g}"
    if len(rows) > 1:
        far = f"{min(apart):.2g} to {far}, median {median(apart):.2g}"
    terms, size = rows[0]["terms"], max(numbers(rows, "size"))
    return f"{name} (sums of up to {terms:,} products, size up to {size:.2g}) {far} apart (absolute)"


def _shrinks(found: Groups) -> str:
    pairs = [(found[FULL_FLOAT64, p], found["float32", p]) for p in PASSES]
    seen = [median(over) for wide, narrow in pairs if (over := ratios(wide, narrow))]
    if not any(seen):
        return "In float64 nothing differs." if seen else ""
    return f"In float64 the difference is {max(seen):.2g} of that; rounding predicts {2.0**-29:.2g}."


def _drifts(values: Values) -> str:
    ends = [window for window in each(values, "window") if window.get("control")]
    if not ends:
        return ""
    mine, control = (median(numbers(ends, role)) for role in ("candidate", "control"))
    further = "further" if mine > HALFWAY_BITS * control else "no further"
    moved = "" if len(ends) == len(values) else " in which the control moved"
    return (
        f"After {counted(ends[0]['steps'], 'update')} the weights are {mine:.2g} apart (relative, median of "
        f"{seeds(ends)}{moved}), those of a control with one weight moved by one ulp "
        f"{control:.2g}: it drifts {further} than the control. How that grows in a network: "
        "+experiment=split_conv."
    )
