"""Does the gradient follow the loss when that is scaled, as the trainings of float16 scale it?

A backward pass is linear in the gradient that it is given. So the gradients of a loss times 2^16, divided by
2^16, are those of the loss, to the last bit in float64: a power of two touches no significand. A guard that
clamps a gradient, a term that is added to it, a threshold in a kernel are right without a scaler and wrong
with it (Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2). Asked of the float16 code
path computed in float64, where nothing overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import distance
from driftlab.arithmetic.passes import CannotRunError, Recorded, run
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.rounding import HALFWAY, UNIT_ROUND_OFF
from driftlab.words import Finding, Place, Verdict

# What torch's and Lightning's scalers begin with.
SCALE = 2.0**16
THRESHOLD = HALFWAY * UNIT_ROUND_OFF["float64"]


def ask(found: Examination) -> list[Finding]:
    pair = found.pair
    if pair.precision.autocast is not torch.float16 or found.whole.loss is None:
        return [PROBE.not_applicable("no loss is scaled")]
    try:
        mine, theirs = (_off(found, network) for network in (pair.reference, pair.candidate))
    except CannotRunError as error:
        return [PROBE.not_applicable(f"it cannot be computed in float64: {error}")]
    worst = max(theirs, key=theirs.__getitem__, default=None)
    if max(mine.values(), default=0.0) > THRESHOLD:
        return [PROBE.not_applicable("the reference's own gradients do not follow a scaled loss")]
    if worst is None or theirs[worst] <= THRESHOLD:
        return [PROBE.finding(theirs.get(worst, 0.0), None, "they do")]
    module = _nearest_to_the_loss(pair.candidate, [n for n, off in theirs.items() if off > THRESHOLD])
    place = Place(module, "weight gradient", 0)
    says = f"{{place}}: of a loss times 2^16 the gradient of {worst}, divided by 2^16, is "
    says += f"{theirs[worst]:.2g} (relative) off; the reference's gradients follow it"
    return [PROBE.finding(theirs[worst], Verdict.BUG, says, place)]


def _off(found: Examination, network: nn.Module) -> Mapping[str, float]:
    """By parameter, the relative distance between its gradient and that of the scaled loss."""
    plain, whole = found.whole.loss, found.whole
    scaled = replace(whole, loss=lambda *given: SCALE * plain(*given))
    own, other = (_gradients(found, network, recorded) for recorded in (whole, scaled))
    sizes = {name: float(torch.linalg.vector_norm(g)) for name, g in own.items()}
    return {n: distance(other[n] / SCALE, g) / sizes[n] for n, g in own.items() if sizes[n]}


def _gradients(found: Examination, network: nn.Module, recorded: Recorded) -> Mapping[str, Tensor]:
    return run(network, recorded, "shadow", found.pair.seed, evaluate=False).tensors["weight gradient"]


def _nearest_to_the_loss(network: nn.Module, wrong: list[str]) -> str:
    """The last of the modules whose own weights are concerned; those before it are reached through it."""
    return [name for name, _ in network.named_parameters() if name in wrong][-1].rpartition(".")[0]


PROBE = Probe(
    name="scaled_loss",
    question="Of a scaled loss, are the gradients scaled by as much and otherwise the same?",
    threshold=THRESHOLD,
    reason="a power of two changes no significand, in float64 rounding is 2^-53",
    sees="what a loss scaler brings about: gradients that are clamped, thresholds, terms that are added",
    misses="asked in 16-mixed alone, where a loss is scaled",
    unit="distance, relative",
    order=72,
    ask=ask,
)
