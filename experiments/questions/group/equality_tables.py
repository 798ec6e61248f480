"""groups=2 against convs side by side: largest differences, bounds and integers, with their conclusions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlab.probes.integers import EXACT_PASSES
from driftlab.report.sections import Table
from experiments.questions.group.words import between, percent, seeds_text

Values = Mapping[int, dict]

# For the forward pass of the thread's conv, of the size that the thread gives it.
THREAD_CASE = "Conv2d(6, 6, 3, padding=1, groups=2, bias=False) on [1, 6, 24, 24]"
THREAD = 3.5763e-07
ISSUE = {"float32": (2e-7, 4e-7, "2e-7 to 4e-7, or 0"), "float64": (0.0, 1e-15, "0 to 1e-15")}


def literal_table(values: Values) -> Table:
    """The thread's own lines: largest differences over the seeds, by dtype and pass."""
    literals = [v["literal"] for v in values.values()]
    rows = [_literal_row(dtype, pass_, literals) for dtype in ISSUE for pass_ in EXACT_PASSES]
    columns = {
        "dtype": "dtype",
        "pass": "pass",
        "smallest": "largest difference, least over seeds (absolute)",
        "absolute": "largest difference, greatest over seeds (absolute)",
        "expected": "expected by the issue (absolute)",
        "relative": "over the tensor's largest entry (relative)",
        "ulps": "in ulps of the entry where it is largest",
        "share": "largest share of its bound that an entry uses",
        "integers": "integers equal in every bit (seeds)",
    }
    title = f"{literals[0]['case']} against convs side by side"
    return Table("side_by_side", title, columns, rows, _literal_conclusion(rows, literals))


def _literal_row(dtype: str, pass_: str, literals: Sequence[dict]) -> dict:
    found = [f for one in literals for f in one["passes"] if (f["dtype"], f["pass"]) == (dtype, pass_)]
    largest = ("absolute", "relative", "ulps", "u", "bound", "share")
    row = {"dtype": dtype, "pass": pass_, "smallest": min(f["absolute"] for f in found)}
    row |= {key: max(f[key] for f in found) for key in largest}
    row["equal"] = sum(f["equal"] for f in found) / sum(f["entries"] for f in found)
    asked = pass_ == "forward" and literals[0]["case"] == THREAD_CASE
    row["expected"] = ISSUE[dtype][2] if asked else None
    if dtype == "float32":
        errors = [one["errors"][pass_] for one in literals]
        exact = sum(bool(one["integers"] and one["integers"][pass_]) for one in literals)
        row |= {kind: max(e[kind] for e in errors) for kind in ("grouped", "separate")}
        row["integers"] = f"{exact} of {len(literals)}"
    return row


def _literal_conclusion(rows: Sequence[dict], literals: Sequence[dict]) -> str:
    single, double = ({row["dtype"]: row for row in rows if row["pass"] == "forward"}[d] for d in ISSUE)
    kernels, worst = literals[0]["kernels"], max(row["share"] for row in rows)
    within = ", which is rounding." if worst <= 1 else ", more than another order of the sums can make."
    return " ".join(
        [
            _on_integers(literals),
            f"At most {percent(worst)} of the rounding bound is used{within}" if worst else "No bit differs.",
            f"Forward, {seeds_text(len(literals))}: in float32 "
            f"{between(single['smallest'], single['absolute'])} apart (absolute{_as_expected(single)}), in "
            f"float64 {between(double['smallest'], double['absolute'])} (absolute{_as_expected(double)}).",
            *_the_threads(single),
            *(_which_kernels(dtype, kernels[dtype]) for dtype in kernels),
        ]
    )


def _on_integers(literals: Sequence[dict]) -> str:
    asked = [one["integers"] for one in literals if one["integers"]]
    if not asked:
        return "The grouped conv is not exact on integers itself (Winograd, FFT): they decide nothing here."
    if all(all(passes.values()) for passes in asked):
        return "The same function: on integers both agree in every bit, forward and in both gradients."
    return "More than rounding: on integers, where no sum is rounded, the two differ."


def _as_expected(row: dict) -> str:
    if row["expected"] is None:
        return ""
    low, high, text = ISSUE[row["dtype"]]
    if row["absolute"] == 0:
        return ", every bit equal, as the issue allows"
    fits = (row["smallest"] == 0 or low <= row["smallest"]) and row["absolute"] <= high
    return f", as the issue expects: {text}" if fits else f"; the issue expects {text}"


def _which_kernels(dtype: str, chosen: Mapping[str, Sequence[str]]) -> str:
    own, other = (" and ".join(chosen[kind]) for kind in ("grouped", "separate"))
    if own == other:
        return f"In {dtype} torch computes both by the same kernel ({own})."
    return (
        f"In {dtype} torch computes the grouped conv by the kernel {own}, the convs side by side by {other}."
    )


def _the_threads(row: dict) -> list[str]:
    if row["expected"] is None or not row["absolute"]:
        return []
    return [f"The thread's {THREAD:.5g} is {THREAD / row['absolute']:.2g} times the greatest here."]


def errors_table(values: Values) -> Table:
    """Both float32 results against float64."""
    literals = [v["literal"] for v in values.values()]
    rows = [_literal_row("float32", p, literals) | {"nearer": _nearer(p, literals)} for p in EXACT_PASSES]
    columns = {
        "pass": "pass",
        "grouped": "largest error of the grouped conv, greatest over seeds (absolute)",
        "separate": "of the convs side by side, likewise (absolute)",
        "nearer": "seeds: grouped nearer / side by side nearer / equal",
        "equal": "entries equal in every bit (share)",
        "u": "largest difference (u |W| * |x|)",
        "bound": "2 gamma_K of the longest sum (u |W| * |x|)",
    }
    within = all(row["share"] <= 1 for row in rows)
    conclusion = (
        f"{'Neither is the right one, both are rounded' if within else 'They differ by more than rounding'}: "
        "their errors against float64, and in how many seeds either has the smaller one."
    )
    return Table("errors", "Which float32 result is nearer to the exact one", columns, rows, conclusion)


def _nearer(pass_: str, literals: Sequence[dict]) -> str:
    pairs = [(one["errors"][pass_]["grouped"], one["errors"][pass_]["separate"]) for one in literals]
    grouped, separate = sum(g < s for g, s in pairs), sum(s < g for g, s in pairs)
    return f"{grouped} / {separate} / {len(pairs) - grouped - separate}"


def sweep_table(values: Values) -> Table:
    """Other convolutions: how many agree in every bit, and how far the others are apart."""
    cases = [case for v in values.values() for case in v["sweep"]]
    kinds = sorted({case["groups"] for case in cases}, key=lambda kind: (isinstance(kind, str), kind))
    rows = [_sweep_row(k, p, [c for c in cases if c["groups"] == k]) for k in kinds for p in EXACT_PASSES]
    columns = {
        "groups": "groups",
        "pass": "pass",
        "cases": "convolutions (count)",
        "equal": "equal in every bit, float32 (count)",
        "u": "largest difference (u |W| * |x|)",
        "share": "largest share of the bound, entry by entry",
        "exact": "integers equal in every bit (count)",
        "asked": "integers asked (count)",
    }
    title = "Other convolutions: channels, groups, kernel, stride, dilation, padding, padding mode, bias"
    return Table("sweep", title, columns, rows, _sweep_conclusion(rows, cases))


def _sweep_row(kind: int | str, pass_: str, cases: Sequence[dict]) -> dict:
    found = [f for case in cases for f in case["passes"] if f["pass"] == pass_]
    asked = [case["integers"][pass_] for case in cases if case["integers"]]
    return {
        "groups": str(kind),
        "pass": pass_,
        "cases": len(cases),
        "equal": sum(f["equal"] == f["entries"] for f in found),
        "u": max(f["u"] for f in found),
        "share": max(f["share"] for f in found),
        "exact": sum(asked),
        "asked": len(asked),
    }


def _sweep_conclusion(rows: Sequence[dict], cases: Sequence[dict]) -> str:
    equal = sum(all(f["equal"] == f["entries"] for f in case["passes"]) for case in cases)
    u, share = (max(row[key] for row in rows) for key in ("u", "share"))
    within = "." if share <= 1 else ", more than another order of the sums can make."
    return (
        f"{_sweep_on_integers(rows, cases)} Of {len(cases)} convolutions {equal} agree in every bit of "
        f"float32 in all passes; the largest difference is {u:.3g} u |W| * |x|, the largest share of its "
        f"bound that an entry uses {percent(share)}{within}"
    )


def _sweep_on_integers(rows: Sequence[dict], cases: Sequence[dict]) -> str:
    exact, asked = (sum(row[key] for row in rows) for key in ("exact", "asked"))
    if not asked:
        return "No grouped conv here is exact on integers itself: they decide nothing."
    wrong = [case["case"] for case in cases if case["integers"] and not all(case["integers"].values())]
    if wrong:
        return f"{asked - exact} of {asked} integer checks do not agree, the first for {wrong[0]}."
    return f"The equality is general: all {asked} integer checks agree in every bit."
