"""The tables of a gradient check: the literal case, the best step, what helps, planted faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from omegaconf import DictConfig

from driftlab.report.sections import Table
from experiments.gradient_check import series as of
from experiments.gradient_check.measures import AS_IT_IS, AVERAGED
from suite.showing import wording as say
from suite.showing.wording import Column, Rows, Values

_EXPECTED = {
    "float32": "0, 0.66, 1.58, 1.75, 4.03: wrong",
    "float64": "0.9993 to 1.0004 (4 points); 0.9966 to 1.001",
}


def literal_table(settings: DictConfig, values: Values) -> Table:
    rows = [_literal_row(settings, values, dtype) for dtype in ("float32", "float64")]
    columns = {
        "dtype": "dtype",
        "points": "points (n)",
        "loss": "loss (median over seeds)",
        "quantum": "spacing of the loss / eps (absolute)",
        "low": "ratio, 5 %",
        "middle": "ratio, median",
        "high": "ratio, 95 %",
        "least": "ratio, least",
        "most": "ratio, greatest",
        "within": "points within 1 % (%)",
        "error": "|numeric - autograd| (absolute, median)",
        "law": "predicted (absolute)",
    }
    title = "Numeric over autograd's derivative, one-sided"
    if _as_asked(settings):
        title = "The thread's check: numeric over autograd's derivative"
        columns["expected"] = "expected ratios (thread; predicted)"
    return Table("literal", title, columns, rows, _literal_words(settings.case.eps, values, *rows))


def _literal_row(settings: DictConfig, values: Values, dtype: str) -> dict:
    quotients = of.ratios(values, dtype)
    shares = {"least": 0, "low": 0.05, "middle": 0.5, "high": 0.95, "most": 1}
    return {
        "dtype": dtype,
        "points": len(of.points(values, dtype)[0]),
        "loss": median(say.each(values, "literal", dtype, "loss")),
        "quantum": median(say.each(values, "literal", dtype, "quantum")),
        **{k: f"{float(np.quantile(quotients, s)) + 0.0:.4f}" for k, s in shares.items()},  # -0 reads 0
        "within": float(100 * np.mean(np.abs(quotients - 1) <= 0.01)),
        "error": float(np.median(of.off(values, dtype))),
        "law": of.literal_law(values, dtype).error(settings.case.eps),
        **({"expected": _EXPECTED[dtype]} if _as_asked(settings) else {}),
    }


def _as_asked(settings: DictConfig) -> bool:
    """Whether it is the case of the thread, of which there are numbers to expect."""
    case, literal = settings.case, {"rows": 140, "columns": 120, "reduction": "sum"}
    options = {"reduction": "sum", **(case.options or {})}
    return case.target.endswith("check.case.halved") and case.eps == 1e-3 and options == literal


def _literal_words(eps: float, values: Values, narrow: dict, wide: dict) -> str:
    gap, share = narrow["quantum"], narrow["quantum"] / of.typical_derivative(values)
    coarse = ", whatever the true one is" if share > 0.1 else f" ({share:.1g} of a typical one)"
    small = (
        "; it shows as a ratio far from 1 only where the derivative itself is small" if _even(values) else ""
    )
    stairs = (
        f"In float32 the loss can only take values {gap * eps:.2g} apart, so a numeric "
        f"derivative is a multiple of {gap:.3g}{coarse}"
    )
    return (
        f"{stairs if gap else 'In float32 the loss, 0, has all its digits'}: {narrow['within']:.3g} % of the "
        f"points come within 1 %. In float64 {wide['within']:.3g} % do; what is left there is "
        f"{wide['error']:.2g} (absolute, median; truncation and round-off predict {wide['law']:.2g}){small}."
    )


def _even(values: Values) -> bool:
    """Whether float64 is off by much the same everywhere: by a factor of 2 over the middle 90 % of points."""
    low, high = np.quantile(of.off(values, "float64"), [0.05, 0.95])
    return high <= 2 * low


def step_table(values: Values) -> Table:
    columns = {
        "dtype": "dtype",
        "difference": "difference",
        "predicted": "best eps, predicted",
        "best": "best eps, measured",
        "predicted_error": "error there, predicted (% of the derivative)",
        "error": "error there, measured (% of the derivative)",
    }
    rows = [_step_row(values, dtype, sides) for dtype in ("float32", "float64") for sides in (1, 2)]
    narrow, wide = rows[0], rows[2]
    conclusion = (
        f"One-sided in float32, no eps tried leaves less than {narrow['error']:.2g} % of a typical "
        f"derivative; in float64 eps = {wide['best']:.1g} leaves {wide['error']:.1g} %. A smaller eps has "
        "less truncation and more round-off, u |L| / eps: the best eps is where they cross. The law counts "
        "one rounding of the loss at its largest; a median over points is mostly below."
    )
    return Table("steps", "The best step, predicted and measured", columns, rows, conclusion)


def _step_row(values: Values, dtype: str, sides: int) -> dict:
    steps, derivative = np.array(say.first_of(values)["curve"]["steps"]), of.typical_derivative(values)
    law, measured = of.laws(values, dtype, sides), of.errors(values, dtype, sides)
    best = int(np.nanargmin(measured))
    return {
        "dtype": dtype,
        "difference": "one-sided" if sides == 1 else "central",
        "predicted": f"{law.best_step:.3g}" if math.isfinite(law.best_step) else "the larger the better",
        "best": float(steps[best]),
        "predicted_error": 100 * law.error(min(law.best_step, steps[0])) / derivative,
        "error": float(100 * measured[best] / derivative),
    }


def remedy_table(values: Values) -> Table:
    columns = (
        say.first("what", "what is done"),
        say.first("dtype", "dtype"),
        say.middle("eps", "eps"),
        # a step may leave the domain of the loss: then there is no error
        say.over(_percent, "error", "error (% of the derivative, median over points and seeds)"),
    )
    lines = say.grouped(say.all_rows(values, "remedies"), "what").values()
    return say.table("remedies", "What helps", lines, columns, _remedy_words)


def _percent(errors: list[float]) -> float:
    return 100 * median(errors)


def _remedy_words(rows: Rows) -> str:
    known = [r for r in rows if r["error"] is not None]
    by_name = {r["what"]: r["error"] for r in known}
    best = min(say.chosen(known, dtype="float32"), key=lambda r: r["error"], default=None)
    words = []
    if {AS_IT_IS, AVERAGED} <= set(by_name):
        plain, mean = by_name[AS_IT_IS], by_name[AVERAGED]
        helps = "helps here" if mean < plain / 4 else "changes nothing that matters"
        reason = ": the loss and its move shrink alike, and float32 keeps a share, not an amount"
        words.append(
            f"Averaging the loss {helps} ({plain:.3g} % off before, {mean:.3g} % after)"
            f"{reason if mean >= plain / 4 else ''}."
        )
    if best is not None:
        words.append(
            f"With no more than float32 in the network the best is: {best['what']} ({best['error']:.2g} %)."
        )
    return " ".join(words) or "Every step leaves the domain of the loss: take a smaller eps."


def planted_table(values: Values) -> Table:
    columns = (
        say.first("name", "network"),
        Column("truth", "its gradient is", lambda same: "right" if same[0]["right"] else "wrong"),
        _answers("ours", "driftlab: right answers (of n seeds)"),
        _answers("theirs", "gradcheck: right answers (of n seeds)"),
        Column("suspect", "driftlab names", _suspects),
        say.middle("sees", "it would have seen (share of the gradient)"),
        say.middle("seconds", "driftlab (s, median)"),
        say.over(_whole_median, "forwards", "driftlab (forward passes)"),
        say.middle("their_seconds", "gradcheck (s, median)"),
        say.over(_whole_median, "their_forwards", "gradcheck (forward passes)"),
    )
    title = (
        "Planted faults: driftlab.gradient_check and torch.autograd.gradcheck(fast_mode=True), both by input "
        "and all parameters, in float64, with their defaults"
    )
    lines = say.side_by_side(values, "planted")
    return say.table("planted", title, lines, columns, _planted_words(say.all_rows(values, "planted")))


def _answers(who: str, heading: str) -> Column:
    wanted = {True: "pass", False: "fail"}
    return Column(who, heading, lambda same: say.share_of(r[who] == wanted[r["right"]] for r in same))


def _whole_median(counts: list[int]) -> int:
    return int(median(counts))


def _suspects(same: Rows) -> str:
    return "; ".join(dict.fromkeys(say.numbers(same, "suspect")))


def _planted_words(rows: Rows) -> str:
    wrong, right = ([r for r in rows if r["right"] == side] for side in (False, True))

    def caught(who: str) -> str:
        missed = [r["name"] for r in wrong if r[who] != "fail"]
        return f"{len(wrong) - len(missed)} of {len(wrong)} faults" + _named("missed: ", missed)

    def accused(who: str) -> str:
        false = [r["name"] for r in right if r[who] != "pass"]
        return f"{len(false)} of {len(right)} right networks" + _named("", false)

    return (
        f"driftlab.gradient_check caught {caught('ours')} and did not pass {accused('ours')}; gradcheck in "
        f"fast mode caught {caught('theirs')} and did not pass {accused('theirs')}. "
        f"{_times(right)}gradcheck compares one random projection a tensor, with tolerances of 1e-5 "
        "(absolute) and 1e-3 (relative), does not look for kinks between its two ends, and leaves the "
        "seeding of random layers to its user. Where it fails it goes on in slow mode to word its message, "
        "which is not counted here."
    )


def _named(opening: str, names: Sequence[str]) -> str:
    return f" ({opening}{'; '.join(sorted(set(names)))})" if names else ""


def _times(right: Rows) -> str:
    """By network, since one check costs forward passes by the tensor and the other does not."""
    if not right:
        return ""
    ratios = {
        name: median(r["their_seconds"] / r["seconds"] for r in rows)
        for name, rows in say.grouped(right, "name").items()
    }
    forwards = say.numbers(right, "forwards")
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    return (
        f"gradcheck took {ratios[least]:.2g} times as long ({least}) to {ratios[most]:.2g} times ({most}): "
        f"it runs two forward passes a tensor and a few more, driftlab {min(forwards)} to {max(forwards)} in "
        "all where it passes. "
    )
