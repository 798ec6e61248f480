"""The table of planted faults: what two gradient checks say about them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median

from driftlab.report.sections import Table
from experiments.questions.check.series import Values

_TITLE = (
    "Planted faults: driftlab.gradient_check and torch.autograd.gradcheck(fast_mode=True), both by input "
    "and all parameters, in float64, with their defaults"
)


def planted_table(values: Values) -> Table:
    seeds = [v["planted"] for v in values.values()]
    rows = [_row(same) for same in zip(*seeds, strict=True)]
    columns = {
        "name": "network",
        "truth": "its gradient is",
        "ours": "driftlab: right answers (of n seeds)",
        "theirs": "gradcheck: right answers (of n seeds)",
        "suspect": "driftlab names",
        "sees": "it would have seen (share of the gradient)",
        "seconds": "driftlab (s, median)",
        "forwards": "driftlab (forward passes)",
        "their_seconds": "gradcheck (s, median)",
        "their_forwards": "gradcheck (forward passes)",
    }
    return Table("planted", _TITLE, columns, rows, _in_words(list(chain.from_iterable(seeds))))


def _row(same: Sequence[dict]) -> dict:
    first, n = same[0], len(same)
    wanted = "pass" if first["right"] else "fail"
    medians = {k: median(r[k] for r in same) for k in ("sees", "seconds", "their_seconds")}
    counts = {k: int(median(r[k] for r in same)) for k in ("forwards", "their_forwards")}
    return {
        "name": first["name"],
        "truth": "right" if first["right"] else "wrong",
        "ours": f"{sum(r['ours'] == wanted for r in same)} of {n}",
        "theirs": f"{sum(r['theirs'] == wanted for r in same)} of {n}",
        "suspect": "; ".join(dict.fromkeys(r["suspect"] for r in same if r["suspect"])),
        **medians,
        **counts,
    }


def _in_words(rows: Sequence[dict]) -> str:
    wrong, right = [r for r in rows if not r["right"]], [r for r in rows if r["right"]]

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


def _times(right: Sequence[dict]) -> str:
    """By network, since one check costs forward passes by the tensor and the other does not."""
    ratios = {
        name: median(r["their_seconds"] / r["seconds"] for r in right if r["name"] == name)
        for name in dict.fromkeys(r["name"] for r in right)
    }
    if not ratios:
        return ""
    forwards = [r["forwards"] for r in right]
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    return (
        f"gradcheck took {ratios[least]:.2g} times as long ({least}) to {ratios[most]:.2g} times ({most}): "
        f"it runs two forward passes a tensor and a few more, driftlab {min(forwards)} to {max(forwards)} in "
        "all where it passes. "
    )
