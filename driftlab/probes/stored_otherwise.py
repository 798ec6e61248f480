"""Weights that the candidate writes otherwise start alike and are moved otherwise."""

from __future__ import annotations

from driftlab.fold import listed
from driftlab.network.pair import Pair
from driftlab.probes.probe import Probe
from driftlab.words import Excess, Finding, Place, Verdict


def ask_stored_otherwise(pair: Pair, excess: Excess) -> list[Finding]:
    """There is no putting both on the same weights: the update is what parts them."""
    names = pair.written_otherwise
    says = (
        f"{{place}}: the candidate holds {listed(names)} in another form; both agree before the update and "
        "no longer after it, since the optimizer moves what is stored"
    )
    place = Place(names[0].rpartition(".")[0], "update", excess.since("update"))
    return [PROBE.finding(excess.measured, Verdict.BUG, says, place, threshold=excess.allowed)]


PROBE = Probe(
    name="stored_otherwise",
    question="Do both still agree after an update, though some weights are stored in another form?",
    reason="its threshold is 2^14.5 times the controls at that step",
    unit="distance, relative",
    sees="reparametrised weights (scaled, a gain less one) that the optimizer moves otherwise",
    order=110,
)
