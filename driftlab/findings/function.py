"""Do both compute the same function, once rounding is taken away?"""

from __future__ import annotations

from dataclasses import replace

import torch

from driftlab.distance import named_leaves
from driftlab.evidence import HALFWAY
from driftlab.examination import Examination
from driftlab.findings.determinism import wavers
from driftlab.findings.streams import drawn_otherwise
from driftlab.lockstep import evaluation_mode
from driftlab.probes.arithmetic import CannotRunError, run
from driftlab.probes.comparison import Comparison
from driftlab.probes.constants import rounded_constants
from driftlab.probes.difference import Difference
from driftlab.probes.locating import SAME_BORDERS, first_wrong, slightly_wrong
from driftlab.probes.sizes import fewer_samples
from driftlab.probes.tracing import parting
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Fed the same inputs, do both compute the same function, once rounding is taken away?"
# A parameter without a gradient (a bias that the next norm takes away) is not missed.
NO_GRADIENT = 1e-6


def ask_function(found: Examination) -> None:
    """On the batch; and where nothing is wrong there, on fewer samples of it."""
    _ask(found)
    if found.comparable and not found.supports(Verdict.BUG) and not found.supports(Verdict.NONDETERMINISTIC):
        _ask_fewer(found)


FEWER = "On fewer samples than the batch holds, do both still compute the same function?"


def _ask_fewer(found: Examination) -> None:
    """Batches end in odd ones: three samples, and one, where the reference takes them."""
    for size in (3, 1):
        batch = fewer_samples(found.batch, size)
        if batch is None:
            continue
        part = Examination(found.subject, batch)
        try:
            wrong = bool(part.network.wrong())
        except CannotRunError as error:
            _say_refused(found, batch, size, str(error))
            continue
        if wrong:
            _ask(part)
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


def _ask(found: Examination) -> None:
    network, wrong = found.network, found.network.wrong()
    located = first_wrong(found.local) if wrong else slightly_wrong(found.local)
    if wrong and drawn_otherwise(found, located):
        return
    if not wrong and located is None:
        return _same(found, network)
    module, difference = located or (_owner(wrong), wrong[0])
    if (why := rounded_constants(found.subject, found.whole, wrong or [difference])) is not None:
        found.narrow_constants = True
        return _same(found, network, why)
    if wavers(found, module):
        return
    place = Place(*_placed(found, module, difference), 0)
    excess = min(excess_of(difference, network), 1e300) * HALFWAY
    found.add(
        Evidence("function", QUESTION, excess, HALFWAY, Verdict.BUG, _wrong(difference, place, network)),
        place,
    )


def _owner(wrong: list[Difference]) -> str:
    """The module whose gradients or buffers alone are wrong, though each of its calls is right.

    A tie undone, statistics that miss one of two calls.
    """
    pass_ = wrong[0].pass_
    owners = {d.name.rpartition(".")[0] for d in wrong if d.pass_ == pass_}
    return owners.pop() if len(owners) == 1 and pass_ in ("weight gradient", "buffer") else ""


def _placed(found: Examination, module: str, difference: Difference) -> tuple[str, str]:
    """The place by pairs of modules, or a more exact one by the values on the way.

    Values are asked where the pairs end at a module with others inside, or at one so far off that its borders
    may have moved. A module that they accuse, and that is right by itself, was used wrongly: the fault is
    around it.
    """
    subject, local, pass_ = found.subject, found.local, difference.pass_
    whole = not module or next(subject.reference.get_submodule(module).children(), None) is not None
    moved = pass_ == "forward" and not difference.relative < SAME_BORDERS
    moved = moved and not (module and local.permuted(module))
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


def excess_of(difference: Difference, network: Comparison) -> float:
    return difference.excess("shadow" if "shadow" in network.ran else "float64")


def _same(found: Examination, network: Comparison, why: str = "") -> None:
    missed = _untrained(found)
    if missed:
        return _not_trained(found, missed)
    worst = max((excess_of(d, network) for d in network.differences), default=0.0) * HALFWAY
    how = "their float32 path computed in float64" if "shadow" in network.ran else "float64"
    reading = (
        "they do, bit for bit"
        if network.same_bits
        else f"they do: in {how}, {worst:.2g} times what rounding makes"
    )
    if why:
        reading = f"they do, but for {why}"
    if "float64" in network.failed:
        reading += f"; the candidate cannot run in float64 itself ({network.failed['float64']})"
    elif network.float64_not_honoured:
        reading += (
            "; given float64, it computes in fewer bits all the same, which is no difference in the function"
        )
    found.add(Evidence("function", QUESTION, worst, HALFWAY, Verdict.ROUND_OFF, reading))


def _wrong(difference: Difference, place: Place, network: Comparison) -> str:
    if difference.reshaped:
        return f"{place}: the candidate's has another shape"
    if difference.overflows:
        return f"{place}: the candidate's float32 is not finite where the reference's is"
    named = f" ({difference.name})" if difference.pass_ == "weight gradient" else ""
    how = "with the rounding taken away" if "shadow" in network.ran else "in float64"
    return (
        f"{place}{named}: fed the reference's exact inputs it is {difference.relative:.2g} (relative) off "
        f"{how}, "
        f"where rounding would be gone"
    )


def _untrained(found: Examination) -> list[str]:
    """Reference parameters that get a gradient and have nothing in the candidate that could hold them."""
    subject = found.subject
    spare = {n for n, p in subject.candidate.named_parameters() if p.requires_grad} & set(subject.fold.unused)
    trained = {n for n, p in subject.reference.named_parameters() if p.requires_grad}
    missing = [n for n in subject.fold.unplaced if n in trained] if not spare else []
    if not missing:
        return []
    gradients = run(subject.reference, found.whole, "float32", subject.seed).tensors["weight gradient"]
    size = max(float(torch.linalg.vector_norm(g)) for g in gradients.values())
    return [n for n in missing if float(torch.linalg.vector_norm(gradients[n])) > NO_GRADIENT * size]


def _not_trained(found: Examination, missed: list[str]) -> None:
    place = Place(missed[0].rpartition(".")[0], "update", 0)
    reading = (
        f"{', '.join(missed[:4])}: trained in the reference, and among the candidate's parameters there is "
        f"none for it"
    )
    found.add(Evidence("function", QUESTION, float(len(missed)), 0.0, Verdict.BUG, reading), place)
