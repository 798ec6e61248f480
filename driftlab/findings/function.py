"""Do both compute the same function, once rounding is taken away?"""

from __future__ import annotations

import torch

from driftlab.evidence import HALFWAY
from driftlab.examination import Examination
from driftlab.findings.determinism import wavers
from driftlab.findings.placing import other_weights, owner, placed
from driftlab.findings.streams import drawn_otherwise
from driftlab.probes.arithmetic import run
from driftlab.probes.comparison import Comparison
from driftlab.probes.constants import rounded_constants
from driftlab.probes.difference import Difference
from driftlab.probes.locating import first_wrong, slightly_wrong
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Fed the same inputs, do both compute the same function, once rounding is taken away?"
# A parameter without a gradient (a bias that the next norm takes away) is not missed.
NO_GRADIENT = 1e-6


def ask_function(found: Examination) -> None:
    """On the batch, for the whole network and for every rewritten module."""
    network, wrong = found.network, found.network.wrong()
    located = first_wrong(found.local) if wrong else slightly_wrong(found.local)
    if wrong and drawn_otherwise(found, located):
        return
    if not wrong and located is None:
        return _same(found, network)
    module, difference = located or (owner(wrong), wrong[0])
    if (why := rounded_constants(found.subject, found.whole, wrong or [difference])) is not None:
        found.narrow_constants = True
        return _same(found, network, why)
    if wavers(found, module):
        return
    place = other_weights(found, difference) or Place(*placed(found, module, difference), 0)
    # found on some samples of the batch alone: this training may come to it later
    probe = "function" if wrong or found.local.wrong(module) else "fewer_samples"
    excess = min(excess_of(difference, network), 1e300) * HALFWAY
    found.add(
        Evidence(probe, QUESTION, excess, HALFWAY, Verdict.BUG, _wrong(difference, place, network)),
        place,
    )


def excess_of(difference: Difference, network: Comparison) -> float:
    return difference.excess("shadow" if "shadow" in network.ran else "float64")


def _same(found: Examination, network: Comparison, why: str = "") -> None:
    missed = _untrained(found) if found.trains else []
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
    supports = Verdict.BIT_IDENTICAL if network.same_bits else Verdict.ROUND_OFF
    found.add(Evidence("function", QUESTION, worst, HALFWAY, supports, reading))


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
