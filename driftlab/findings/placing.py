"""The place of a difference in the function: which module, which pass."""

from __future__ import annotations

from driftlab.examination import Examination
from driftlab.probes.difference import Difference
from driftlab.probes.locating import SAME_BORDERS
from driftlab.probes.tracing import parting
from driftlab.verdict import Place, Verdict


def other_weights(found: Examination, difference: Difference) -> Place | None:
    """Where a parameter starts from another value, which is what makes the function another."""
    grave = [s.place for s in found.start if s.supports is Verdict.BUG and s.measured]
    return next((p for p in grave if p.pass_ == difference.pass_ == "forward"), None)


def owner(wrong: list[Difference]) -> str:
    """The module whose gradients or buffers alone are wrong, though each of its calls is right.

    A tie undone, statistics that miss one of two calls.
    """
    pass_ = wrong[0].pass_
    owners = {d.name.rpartition(".")[0] for d in wrong if d.pass_ == pass_}
    return owners.pop() if len(owners) == 1 and pass_ in ("weight gradient", "buffer") else ""


def placed(found: Examination, module: str, difference: Difference) -> tuple[str, str]:
    """The place by pairs of modules, or a more exact one by the values on the way.

    Values are asked where the pairs end at a module with others inside, or at one so far off that its borders
    may have moved. A module that they accuse, and that is right by itself, was used wrongly: the fault is
    around it.
    """
    subject, local, pass_ = found.subject, found.local, difference.pass_
    whole = not module or next(subject.reference.get_submodule(module).children(), None) is not None
    moved = pass_ == "forward" and not difference.relative < SAME_BORDERS
    complete = all(n in local.pairs for n in local.calls)
    moved = moved and not complete and not (module and local.permuted(module))
    asked = pass_ in ("forward", "input gradient", "weight gradient") and found.float64
    parted = _parted(found) if asked and (whole or moved) else None
    if parted is None or (parted[1] == "forward") != (pass_ == "forward"):
        return module, pass_
    name, where = parted
    paired = name in local.pairs and bool(local.calls.get(name))
    if paired and local.comparisons(name) and local.wrong(name) is None:
        name = name.rpartition(".")[0]
    inside = f"{module}." if module else ""
    return (name, where) if moved or name.startswith(inside) else (module, pass_)


def _parted(found: Examination) -> tuple[str, str] | None:
    try:
        return parting(found.subject.reference, found.subject.candidate, found.whole, found.subject.seed)
    except Exception:  # a module that takes no hooks, or a kernel that cannot be watched
        return None
