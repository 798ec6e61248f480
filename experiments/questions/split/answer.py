"""The answer to the thread, with its tables and figures."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from driftlab.evidence import HALFWAY_BITS
from driftlab.report.sections import Answer
from experiments.questions.split.case import read_case
from experiments.questions.split.factors import bound_in_words, factors, sweep_rows
from experiments.questions.split.figures import literal_figure, sweep_figure
from experiments.questions.split.fits import laws
from experiments.questions.split.literal import FULL_FLOAT64
from experiments.questions.split.passes import PASSES
from experiments.questions.split.reasons import accuracy, accuracy_in_words, causes, why_input
from experiments.questions.split.seeds import Group, Values, groups, integers_equal, ratios, seeds_in_words
from experiments.questions.split.tables import Groups, differences, dtype_ratios, scales


def answer(settings: DictConfig, values: Values) -> Answer:
    """Everything that the seeds show; at least one."""
    case = read_case(settings.get("case"), "case")
    tables = [
        differences(values, case),
        scales(values),
        dtype_ratios(values),
        accuracy(values),
        causes(values, case),
        factors(values),
        laws(values),
    ]
    return Answer(_sentence(values), tables, [literal_figure(values, case), sweep_figure(values)])


def _sentence(values: Values) -> str:
    found = groups(values)
    passes = "; ".join(_pass_in_words(found["float32", p]) for p in PASSES)
    said = [_what_it_is(values, found), f"float32, {seeds_in_words(len(values))}: {passes}."]
    if not any(found["float32", p].differing for p in PASSES):
        said += [f"{g.dtype} {g.pass_} differs." for g in found.values() if g.differing]
    if found["float32", "input gradient"].differing:
        said.append(why_input(values))
    said += [*_shrinks(found), accuracy_in_words(found), *_drifts(values)]
    return " ".join([*said, f"Sweep: {bound_in_words(sweep_rows(values))}"])


def _what_it_is(values: Values, found: Groups) -> str:
    share = max(g.largest("share") for g in found.values())
    if not any(g.differing for g in found.values()):
        return "Nothing differs, in any bit."
    if integers_equal(values) is False:
        return "More than rounding: on integers, where no sum is rounded, original and split differ."
    if share > 1:
        return f"More than the order of a plain sum: up to {share:.2g} times what rounding may do."
    return (
        f"Rounding, no bug: no element differs by more than {share:.2g} of what rounding can make of its sum."
    )


def _pass_in_words(group: Group) -> str:
    if not group.differing:
        return f"{group.pass_} equal bit for bit"
    low, middle, high = group.least("difference"), group.median("difference"), group.largest("difference")
    apart = f"{low:.2g} to {high:.2g}, median {middle:.2g}" if group.n > 1 else f"{high:.2g}"
    terms, size = group.rows[0]["terms"], group.largest("size")
    return f"{group.pass_} (sums of up to {terms:,} products, size up to {size:.2g}) {apart} apart (absolute)"


def _shrinks(found: Groups) -> list[str]:
    pairs = [(found[FULL_FLOAT64, p], found["float32", p]) for p in PASSES]
    seen = [median(over) for wide, narrow in pairs if (over := ratios(wide, narrow))]
    if not any(seen):
        return ["In float64 nothing differs."] if seen else []
    return [f"In float64 the difference is {max(seen):.2g} of that; rounding predicts {2.0**-29:.2g}."]


def _drifts(values: Values) -> list[str]:
    ends = [v["window"] for v in values.values() if v["window"].get("control")]
    if not ends:
        return []
    mine, control = (median(e[role] for e in ends) for role in ("candidate", "control"))
    steps = ends[0]["steps"]
    further = "further" if mine > HALFWAY_BITS * control else "no further"
    moved = "" if len(ends) == len(values) else " in which the control moved"
    return [
        f"After {steps} update{'s' * (steps > 1)} the weights are {mine:.2g} apart (relative, median of "
        f"{seeds_in_words(len(ends))}{moved}), those of a control with one weight moved by one ulp "
        f"{control:.2g}: it drifts {further} than the control. How that grows in a network: "
        "+experiment=split_conv."
    ]
