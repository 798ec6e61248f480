"""Which module is the first that is wrong by itself."""

from __future__ import annotations

from collections.abc import Collection

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.local import Local

# A module whose borders a rewrite moved (conv and norm fused into one, an Identity in the other's place)
# gives something else altogether. Below this relative difference the borders are the same and the function is
# not.
SAME_BORDERS = 1e-2
BACKWARD = ("input gradient", "weight gradient")


def first_wrong(
    local: Local, shown: Collection[str] = (), deeper: bool = False
) -> tuple[str, Difference] | None:
    """The first module that differs by itself, and its pass; from the outside in.

    The first in the order of execution; where that is wrong in the backward pass, which begins at the end,
    the last that is so. Only what lies in a wrong module is looked at: inside a right one a rewrite may have
    moved the borders.

    Args:
        shown: the passes in which the whole networks differ, where they do.
        deeper: whether inside a pair that takes other arguments too, where they may have been moved as well.
    """
    place, inside = None, ""
    while True:
        found = _first_wrong_child(local, inside, shown, deeper)
        if found is None:
            return place
        place, inside = found, found[0]


def _first_wrong_child(
    local: Local, inside: str, shown: Collection[str], deeper: bool
) -> tuple[str, Difference] | None:
    """The first that is given the right inputs and is wrong.

    One that is wrong by little has the right borders, whatever it is given in the candidate's run; one that
    gives something else altogether, where the whole network gives the same, has not. One that gives its
    channels in another order is taken last, and only where every part has its counterpart: else what reads
    them may well expect that order. It does where they come in another shape.
    """
    last = reordered = None
    for name in _children(local, inside, deeper):
        wrong = local.wrong(name)
        if not wrong or (not _is_slight(wrong) and not local.aligned(name)):
            continue
        if wrong.pass_ in BACKWARD:
            last = name, wrong
        elif last:
            continue
        elif wrong.pass_ != "forward" or _is_slight(wrong):
            return name, wrong
        elif wrong.reshaped and local.permuted(name):
            continue
        elif local.reordered(name):
            reordered = reordered or (name, wrong)
        elif not shown or "forward" in shown:
            return name, wrong
    below = f"{inside}." if inside else ""
    complete = all(n in local.counterparts for n in local.calls if n.startswith(below))
    return last or (reordered if complete else None)


def _children(local: Local, inside: str, deeper: bool) -> list[str]:
    """The paired modules right below ``inside``; those of an unpaired one count as its parent's.

    ``deeper``: so do those of a pair that takes other arguments.
    """
    below = f"{inside}." if inside else ""
    names = [n for n in local.calls if n in local.counterparts and n.startswith(below) and n != inside]
    found: list[str] = []
    for name in sorted(names, key=lambda n: n.count(".")):  # from the outside in
        covered = any(name.startswith(f"{o}.") for o in found)
        if not covered and (not deeper or local.comparisons(name)):
            found.append(name)
    return [n for n in names if n in found]


def _is_slight(wrong: Difference) -> bool:
    return wrong.pass_ == "forward" and wrong.relative < SAME_BORDERS


def slightly_wrong(local: Local) -> tuple[str, Difference] | None:
    """The first rewritten module that is no rounding off, but so little that its borders are the same.

    What it keeps tells of how many numbers it was given, so that these have to be as many in its own run.
    """
    for name in local.rewritten():
        wrong = local.wrong(name, few=True)
        slightly = wrong is not None and wrong.relative < SAME_BORDERS
        if slightly and (wrong.pass_ != "buffer" or local.aligned(name)):
            return name, wrong
    return None
