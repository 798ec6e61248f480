"""Do both compute the same function on fewer samples than the batch holds?"""

from __future__ import annotations

from dataclasses import replace

from driftlab.distance import named_leaves
from driftlab.examination import Examination
from driftlab.findings.function import ask_function
from driftlab.lockstep import evaluation_mode
from driftlab.probes.arithmetic import CannotRunError
from driftlab.probes.sizes import fewer_samples
from driftlab.verdict import Evidence, Place, Verdict

FEWER = "On fewer samples than the batch holds, do both still compute the same function?"


def ask_fewer_samples(found: Examination) -> None:
    """Batches end in odd ones: three samples, and one, where the reference takes them.

    Not asked where something is wrong already, or nothing can be compared.
    """
    if not found.comparable or found.supports(Verdict.BUG) or found.supports(Verdict.NONDETERMINISTIC):
        return
    for size in (3, 1):
        batch = fewer_samples(found.batch, size)
        if batch is None:
            continue
        part = Examination(found.subject, batch, trains=found.trains)
        try:
            wrong = bool(part.network.wrong())
        except CannotRunError as error:
            _say_refused(found, batch, size, str(error))
            continue
        if wrong:
            ask_function(part)
            bugs = [f for f in part.findings if f.evidence.supports is Verdict.BUG]
            for finding in bugs[:1]:
                reading = f"on {_samples(size)}: {finding.evidence.reading}"
                found.add(
                    replace(finding.evidence, probe="fewer_samples", question=FEWER, reading=reading),
                    finding.place,
                )
                return


def _samples(size: int) -> str:
    return "one sample" if size == 1 else f"{size} samples"


def _say_refused(found: Examination, batch: tuple[object, object], size: int, error: str) -> None:
    """A candidate that raises on a size is loud about it; one that gives another shape is wrong."""
    subject, mode = found.subject, "in eval mode"
    shapes = []
    for network in (subject.reference, subject.candidate):
        try:
            with evaluation_mode(network):
                outputs = named_leaves(subject.call(network, batch[0]))
        except Exception:  # whatever a stranger's forward raises: it refuses this size
            break
        shapes.append({name: tuple(t.shape) for name, t in outputs.items()})
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        reading = (
            f"on {_samples(size)} {mode}, the candidate's outputs have the shapes {shapes[1]}, not "
            f"{shapes[0]}"
        )
        found.add(Evidence("fewer_samples", FEWER, None, None, Verdict.BUG, reading), Place("", "forward", 0))
    elif len(shapes) == 1:
        reading = f"the candidate takes no batch of {size}: {error}"
        found.add(Evidence("fewer_samples", FEWER, None, None, None, reading))
