"""Is the candidate as precise as its dtype promises?"""

from __future__ import annotations

import math

from driftlab.evidence import HALFWAY_BITS
from driftlab.examination import Examination
from driftlab.probes.arithmetic import CannotRun
from driftlab.probes.comparison import Difference, compare
from driftlab.probes.locating import Local
from driftlab.probes.sizes import centred
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Against the exact result, is the candidate's float32 as near as the reference's?"


def ask_precision(found: Examination) -> None:
    network = found.network
    if not found.comparable or not {"shadow", "float64"} & set(network.ran):
        found.add(
            Evidence(
                "precision", QUESTION, None, HALFWAY_BITS, None, "there is no exact result to hold it against"
            )
        )
        return
    narrow = _first_narrow(found)
    if narrow is None:
        worst = max((d.lost for d in network.differences if math.isfinite(d.lost)), default=0.0)
        reading = f"its error is at most {worst:.2g} times the reference's"
        found.add(Evidence("precision", QUESTION, worst, HALFWAY_BITS, None, reading))
        return
    module, difference = narrow
    place = Place(module, difference.pass_, 0)
    bits = max(1.0, 24 - math.log2(difference.lost)) if math.isfinite(difference.lost) else 0
    reading = f"{place}: its error is {difference.lost:.2g} times the reference's: about {bits:.0f} bits instead of 24"
    found.add(
        Evidence("precision", QUESTION, difference.lost, HALFWAY_BITS, Verdict.REDUCED_PRECISION, reading),
        place,
    )


def _first_narrow(found: Examination) -> tuple[str, Difference] | None:
    """The innermost module, first in execution order, that loses bits by itself; "" where only the whole does.

    Fewer bits show on any inputs. An algorithm that cancels (a variance in one pass) loses them only where a
    large mean stands on a small spread, so the loss must stay when the inputs are centred.
    """
    local = found.local
    conditioned = False
    for name in local.rewritten():
        differences = [d for c in local.comparisons(name) for d in c.narrow()]
        if differences and local.wrong(name) is None:
            if _stays(local, name):
                return name, differences[0]
            conditioned = True
    narrow = found.network.narrow()
    return ("", narrow[0]) if narrow and not conditioned else None


def _stays(local: Local, name: str) -> bool:
    mine, theirs = local.pair(name)
    try:
        call = centred(local.calls[name][0])
        again = compare(mine, theirs, call, local.fold, prefixes=(name, local.pairs[name]), seed=local.seed)
    except CannotRun:
        return True
    return bool(again.narrow())
