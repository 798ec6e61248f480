"""Random layers that draw in another order: told from random layers that draw otherwise."""

from __future__ import annotations

from driftlab.examination import Examination
from driftlab.probes.difference import Difference
from driftlab.probes.locating import Local
from driftlab.probes.randomness import SIGMAS, is_random, same_distribution
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Do random layers draw from the same distribution in both, though not the same numbers?"


def drawn_otherwise(found: Examination, located: tuple[str, Difference] | None) -> bool:
    """Whether what differs is how random numbers are drawn; if so, what comes of it is said.

    Only a module that differs forward and is random in both is asked. If it draws from the same distribution
    and eval mode agrees, the two cannot be compared step by step, and nothing is wrong.
    """
    module, difference = located or ("", found.network.wrong()[0])
    local = found.local
    mine, theirs = local.pair(module) if module else (found.subject.reference, found.subject.candidate)
    call = local.calls[module][0] if module else found.whole
    if difference.pass_ not in ("forward", "eval") or not (is_random(mine, call) and is_random(theirs, call)):
        return False
    if difference.pass_ == "eval":
        return False
    if any(
        n for n in local.calls if n in local.pairs and not _related(n, module) and _wrong_forward(local, n)
    ):
        return False
    draws = same_distribution(mine, theirs, call)
    if not draws.same:
        return False
    name = module or "the network"
    if any(d.pass_ == "eval" for d in found.network.wrong()):
        place = Place(module, "eval", 0)
        reading = (
            f"{place}: {name} draws from the same distribution in training mode, and is another in eval mode"
        )
        found.add(Evidence("function", QUESTION, None, None, Verdict.BUG, reading), place)
        return True
    reading = (
        f"the random layers of {name} draw their numbers in another order, from the same distribution "
        f"(means and "
        f"spreads within {draws.sigmas:.1f} standard errors); runs cannot be compared step by step"
    )
    found.comparable = False
    place = Place(module, "forward", 0)
    found.add(
        Evidence("random_streams", QUESTION, draws.sigmas, SIGMAS, Verdict.NONDETERMINISTIC, reading), place
    )
    return True


def _wrong_forward(local: Local, name: str) -> bool:
    """A difference elsewhere that is no matter of random numbers."""
    wrong = local.wrong(name)
    return wrong is not None and not is_random(local.pair(name)[0], local.calls[name][0])


def _related(name: str, other: str) -> bool:
    """Whether one of the two modules is, or lies in, the other."""
    return not other or name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
