"""Does every output of the reference have its counterpart among the candidate's?

What has none is compared nowhere. Where the loss depends on it, a fault in it shows in the loss and in every
gradient; else nothing has looked at it, and no verdict of a same function stands.
"""

from __future__ import annotations

from collections.abc import Mapping

from driftlab.network.outputs import listed
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.words import Finding, Verdict


def ask(found: Examination) -> list[Finding]:
    network, outputs = found.network, found.pair.outputs
    lacking = [n for n in network.unpaired if not outputs.left_out(n)]
    by_hand = [n for n in network.unpaired if outputs.left_out(n)]
    unseen = [n for n in lacking if n not in network.carried]
    parts = [_renamed(outputs.renamed())] if outputs.renamed() else []
    if unseen:
        parts = [_what_to_do(unseen, network.spare)]
    elif lacking:
        parts.append(
            f"the candidate returns no {listed(lacking)}, compared by what the loss makes of it alone"
        )
    if by_hand:
        parts.append(f"{listed(by_hand)} left out by hand")
    if network.spare and not unseen:
        parts.append(f"of the candidate's, {listed(network.spare)} stands for none and is not compared")
    reading = "; ".join(parts) or "it has"
    return [PROBE.finding(float(len(unseen)), Verdict.INCONCLUSIVE if unseen else None, reading)]


def _renamed(names: Mapping[str, str], most: int = 4) -> str:
    said = [f"{listed([mine])} is {listed([theirs])} in the candidate" for mine, theirs in names.items()]
    more = f", and so on for {len(said) - most} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more


def _what_to_do(unseen: list[str], spare: tuple[str, ...]) -> str:
    """What is open, and the argument that settles it."""
    others = f" (left over of its own: {listed(spare)})" if spare else ""
    example = f"{{{unseen[0]!r}: {spare[0] if spare else '...'!r}}}"
    return (
        f"the candidate returns nothing for {listed(unseen)}{others}, and the loss does not depend on it: "
        f"say which of its outputs that is, outputs={example}, or None for one that need not be compared"
    )


PROBE = Probe(
    name="outputs",
    question="Does every output of the reference have its counterpart among the candidate's?",
    threshold=0.0,
    reason="one that is neither compared nor part of the loss is one too many",
    unit="outputs without counterpart",
    sees="outputs that go by another name, which are paired by place, shape and value; those that only one "
    "of the two returns",
    misses="numbers that are no floating ones",
    order=22,
    ask=ask,
    asserted=True,
)
