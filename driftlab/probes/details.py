"""What is told of a difference that was accused, besides that it is none of rounding."""

from __future__ import annotations

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.local import FEW_SAMPLES
from driftlab.arithmetic.locating import BACKWARD
from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.sizes import batch_of
from driftlab.blame import described
from driftlab.mistakes.accused import Accused, accused, worst_element
from driftlab.mistakes.explanations import explained
from driftlab.network.outputs import listed
from driftlab.probes.examination import Examination

# Two runs of the same module on the same call give the same numbers, but for unordered sums.
SAME_CALL = 0.5


def details(found: Examination, module: str, difference: Difference, few: bool, known: str = "") -> str:
    """How many elements are wrong and which most; what would make such a difference, where that is known.

    Args:
        module: whose calls were compared; "" the networks as a whole.
        few: whether that was on a few samples of each call.
        known: what would do that, where it is known already.
    """
    try:
        case = _whole(found, difference) if not module else _of_module(found, module, difference, few)
        if case is None:
            return ""
        # of one gradient by itself an explanation says less than what stops all that are wrong
        told = known and difference.pass_ in BACKWARD
        why = known if told else explained(case) or known
        return "\n".join(filter(None, [_leaves(found), worst_element(case), why]))
    except Exception as error:  # a hint is not worth a verdict, and a mistake in it is not passed over
        return f"driftlab failed to look at it more closely, please report it: {described(error)}"


def _leaves(found: Examination) -> str | None:
    """Which outputs of the network differ, where it has more than one."""
    names = [d.name for d in found.network.wrong() if d.pass_ == "forward" and d.name != LOSS]
    return f"of the outputs these differ: {listed(names)}" if len(names) > 1 else None


def _whole(found: Examination, difference: Difference) -> Accused | None:
    pair = found.pair
    networks = pair.reference, pair.candidate
    options = {"seed": pair.seed, "outputs": pair.outputs, "float64": found.float64}
    return accused(networks, found.whole, difference, pair.comparable, **options)


def _of_module(found: Examination, module: str, difference: Difference, few: bool) -> Accused | None:
    """The call of the module that was found wrong."""
    local = found.local
    options = {"prefixes": local.prefixes(module), "seed": local.seed, "float64": found.float64}
    for call in local.calls[module]:
        some = (batch_of(call, FEW_SAMPLES) if few else None) or call
        case = accused(local.pair(module), some, difference, local.read, **options)
        if case is not None and not case.apart < SAME_CALL * difference.apart.get(case.arithmetic, 0.0):
            return case
    return None
