"""Do both compute the same function on fewer samples than the batch holds?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from driftlab.arithmetic.passes import CannotRunError, on_batch
from driftlab.arithmetic.sizes import fewer_samples
from driftlab.blame import not_ours
from driftlab.network.calling import evaluation_mode, named_leaves
from driftlab.probes.examination import Examination
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.probes.probe import Probe
from driftlab.words import FEWER_SAMPLES, Finding, Place, Verdict

SIZES = (3, 1)


def ask(found: Examination) -> list[Finding]:
    """Batches end in odd ones: three samples, and one, where the reference takes them."""
    accused = found.supports(Verdict.BUG) or found.supports(Verdict.NONDETERMINISTIC)
    if not found.comparable or accused or found.network.untold():
        return [PROBE.not_applicable("asked of the same function alone, where runs can be compared")]
    asked, refused = [], []
    for size in SIZES:
        batch = fewer_samples(found.batch, size)
        if batch is None:
            continue
        part = Examination(found.pair, batch, trains=found.trains)
        try:
            wrong = part.wrong
        except CannotRunError as error:
            refused += _refused(found, batch, size, str(error))
            continue
        if wrong and (accused := _accused(part, size)):
            return [*refused, accused]
        alone = part.network.in_float32_alone and not part.network.same_bits
        asked.append(_samples(size) + " (in float32 alone, where a fault passes for rounding)" * alone)
    if not asked:
        return [*refused, PROBE.not_applicable("the batch holds no more, or takes no fewer")]
    return [*refused, PROBE.finding(None, None, f"they do, on {' and on '.join(asked)}")]


def _accused(part: Examination, size: int) -> Finding | None:
    bugs = [f for f in FUNCTION.ask(part) if f.evidence.supports is Verdict.BUG]
    if not bugs:
        return None
    said = f"on {_samples(size)}: "
    reading = replace(bugs[0].evidence, reading=said + bugs[0].evidence.reading)
    return PROBE.again(replace(bugs[0], evidence=reading, says=said + bugs[0].says))


def _samples(size: int) -> str:
    return "one sample" if size == 1 else f"{size} samples"


def _refused(found: Examination, batch: tuple[object, object], size: int, error: str) -> Iterator[Finding]:
    """A candidate that raises on a size is loud about it; one that gives another shape is wrong."""
    pair, seen = found.pair, []
    for network in (pair.reference, pair.candidate):
        try:
            with evaluation_mode(network):
                seen.append(named_leaves(on_batch(pair, batch).called(network, ((batch[0],), {}))))
        except Exception as raised:  # whatever a stranger's forward raises: it refuses this size
            not_ours(raised)
            break
    if len(seen) == 1:
        yield PROBE.finding(None, None, f"the candidate takes no batch of {size}: {error}")
    elif len(seen) == 2:
        theirs = pair.outputs.of(seen[1], seen[0])
        own, other = ({n: tuple(leaves[n].shape) for n in theirs} for leaves in (seen[0], theirs))
        if own != other:
            said = f"on {_samples(size)} in eval mode"
            says = f"{said}, the candidate's outputs have the shapes {other}, not {own}"
            yield PROBE.finding(None, Verdict.BUG, says, Place("", "forward", 0))


PROBE = Probe(
    name=FEWER_SAMPLES,
    question="On fewer samples than the batch holds, do both still compute the same function?",
    sees="faults of odd batches; another shape for one sample; rewritten modules on the first eight too",
    misses="a candidate that raises there is loud about it: said, not accused",
    order=30,
    ask=ask,
    off_path=True,
    asserted=True,
)
