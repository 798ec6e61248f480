"""Is the candidate as precise as its dtype promises?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from driftlab.evidence import HALFWAY_BITS
from driftlab.examination import Examination
from driftlab.findings.streams import drawn_otherwise
from driftlab.probes.arithmetic import CannotRunError, Recorded
from driftlab.probes.comparison import compare
from driftlab.probes.difference import Difference
from driftlab.probes.sizes import centred, samples, samples_of, without_ties
from driftlab.verdict import Evidence, Place, Verdict

PAIRS = 3
QUESTION = "Against the exact result, is the candidate's float32 as near as the reference's?"


def ask_precision(found: Examination) -> None:
    network = found.network
    if found.supports(Verdict.BUG):
        reading = "asked of the same function alone"
        found.add(Evidence("precision", QUESTION, None, HALFWAY_BITS, None, reading))
        return
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
    if drawn_otherwise(found, narrow):  # in float32 alone
        return
    place = Place(module, difference.pass_, 0)
    bits = max(1.0, 24 - math.log2(difference.lost)) if math.isfinite(difference.lost) else 0
    reading = (
        f"{place}: its error is {difference.lost:.2g} times the reference's: about {bits:.0f} bits instead "
        f"of 24"
    )
    found.add(
        Evidence("precision", QUESTION, difference.lost, HALFWAY_BITS, Verdict.REDUCED_PRECISION, reading),
        place,
    )


def _first_narrow(found: Examination) -> tuple[str, Difference] | None:
    """The innermost module, first in execution order, that loses bits by itself; "" the whole network.

    Fewer bits show on any inputs. An algorithm that cancels (a variance in one pass) loses them only where a
    large mean stands on a small spread, so the loss must stay when the inputs are centred.
    """
    local = found.local
    conditioned = False
    for name in local.rewritten():
        differences = [d for c in local.comparisons(name) for d in c.narrow()]
        if differences and local.wrong(name, few=True) is None:
            if _stays(found, name):
                return name, differences[0]
            conditioned = True
    narrow = found.network.narrow()
    return ("", narrow[0]) if narrow and not conditioned and _stays(found, "") else None


def _stays(found: Examination, name: str) -> bool:
    """Whether the loss stays on centred inputs, and on every one of some pairs of samples.

    The pairs are for kinks: among the half a million pre-activations of a batch one float32 may well fall on
    the other side, and be far off in its gradients for it; among those of two samples it rarely does.
    """
    calls = found.local.calls[name] if name else [found.whole]
    return any(all(_narrow(found, name, trial) for trial in _trials(found, name, call)) for call in calls)


def _trials(found: Examination, name: str, call: Recorded) -> Iterator[Recorded]:
    yield centred(call)
    for start in range(0, 2 * PAIRS, 2):
        part = slice(start, start + 2)
        if name:
            yield samples(call, part) or without_ties(call)
        else:
            batch = samples_of(found.batch, part)
            yield found.subject.on(batch) if batch else without_ties(call)


def _narrow(found: Examination, name: str, call: Recorded) -> bool:
    subject, local = found.subject, found.local
    mine, theirs = local.pair(name) if name else (subject.reference, subject.candidate)
    try:
        prefixes = name, local.pairs[name]
        return bool(
            compare(mine, theirs, call, subject.comparable, prefixes=prefixes, seed=subject.seed).narrow()
        )
    except CannotRunError:
        return True
