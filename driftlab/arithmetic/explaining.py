"""Which of a few known explanations fits a difference: a hint for whoever looks for the fault.

Nothing is decided by it. An explanation is said only where it leaves no more than rounding of the candidate's
result unexplained: a wrong one does so by chance as rarely as two floats of 53 bits are equal.
"""

from __future__ import annotations

from driftlab.arithmetic.accused import Accused
from driftlab.arithmetic.difference import distance
from driftlab.arithmetic.explanations import EXPLANATIONS
from driftlab.arithmetic.what_if import what_ifs


def explained(a: Accused) -> str | None:
    """The first explanation that fits, in words, with what it leaves; None where none does.

    Settings of the reference come first: its own code, run with one of them changed, says more than what two
    results look like.
    """
    if a.arithmetic == "float32" or a.mine.shape != a.theirs.shape or not _all_finite(a):
        return None
    looks = ((words, result) for explain in EXPLANATIONS for words, result in explain(a))
    for words, result in (*what_ifs(a), *looks) if a.mine.numel() else ():
        if result.shape == a.theirs.shape and a.fits(result):
            left = distance(a.theirs, result) / a.apart
            return f"{words} would do that: {f'{left:.0e}' if left else 'nothing'} of the difference is left"
    return None


def _all_finite(a: Accused) -> bool:
    return bool(a.mine.isfinite().all()) and bool(a.theirs.isfinite().all())
