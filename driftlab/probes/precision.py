"""Is the candidate as precise as its dtype promises?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from driftlab.arithmetic.comparison import Comparison, compare
from driftlab.arithmetic.difference import Difference, Nature
from driftlab.arithmetic.grain import inputs_near
from driftlab.arithmetic.passes import CannotRunError, Recorded, on_batch
from driftlab.arithmetic.sizes import centred, samples, samples_of, without_ties
from driftlab.precision import FLOAT32
from driftlab.probes.examination import Examination
from driftlab.probes.flows_part import bits_lost
from driftlab.probes.probe import Probe
from driftlab.probes.random_streams import drawn_otherwise
from driftlab.rounding import HALFWAY_BITS
from driftlab.words import PRECISION, Finding, Place, Status, Verdict

PAIRS = 3


def ask(found: Examination) -> list[Finding]:
    network = found.network
    if found.supports(Verdict.BUG):
        return [PROBE.not_applicable("asked of the same function alone")]
    if not found.comparable or (network.in_float32_alone and not _grainy(network) and found.trains):
        # their curves have a say
        return [PROBE.not_applicable("there is no exact result to hold it against")]
    if network.in_float32_alone:
        return [_in_float32_alone(found)]
    narrow = _first_narrow(found)
    if narrow is None:
        return [_as_near(network)]
    if (drawn := drawn_otherwise(found, narrow)) is not None:  # in float32 alone
        return [drawn]
    module, difference = narrow
    place, few = Place(module, difference.pass_, 0), _fewer(difference)
    place = place if module else bits_lost(found, network.narrow())
    says = f"{{place}}: its error is {difference.lost:.2g} times the reference's: {few}"
    threshold = difference.precision.narrower
    return [PROBE.finding(difference.lost, Verdict.REDUCED_PRECISION, says, place, threshold=threshold)]


def _fewer(d: Difference) -> str:
    lost = math.log2(d.lost) if math.isfinite(d.lost) else math.inf
    if d.precision is FLOAT32:
        return f"about {max(1.0, 24 - lost) if lost < math.inf else 0:.0f} bits instead of 24"
    return f"{lost:.1f} bits fewer than the reference keeps in {d.precision.name}"


def _as_near(network: Comparison, where: str = "") -> Finding:
    """More than the threshold is explained by ``_stays``, which found none of it on other inputs."""
    worst = max((d.lost for d in network.differences if d.counts and math.isfinite(d.lost)), default=0.0)
    own = "the reference's" if network.exact else "what one unit makes of the reference"
    says = f"{where}its error is at most {worst:.2g} times {own}"
    threshold = max((d.precision.narrower for d in network.differences), default=HALFWAY_BITS)
    if worst <= threshold:
        return PROBE.finding(worst, None, says, threshold=threshold)
    says += (
        ": on these inputs, not on centred ones or on each of some pairs of samples: a kink or cancellation"
    )
    return PROBE.finding(worst, Verdict.ROUND_OFF, says, threshold=threshold)


def _in_float32_alone(found: Examination) -> Finding:
    """Beside the reference's exact result, or where it has none beside its float32."""
    exact, narrow = found.network.exact, _first_narrow(found)
    if narrow is None:
        return _as_near(found.network, f"in {found.pair.precision.name} alone, ")
    module, difference = narrow
    units = difference.lost if exact else difference.float32_units
    own = difference.precision
    bits = own.bits - math.log2(units) if math.isfinite(units) else 0
    place = Place(module, difference.pass_, 0)
    if bits < 1:
        says = f"{{place}}: it runs in {own.name} alone, and no bit of that is the reference's"
        return PROBE.finding(units, Verdict.BUG, says, place)
    says = f"{{place}}: it runs in {own.name} alone, and about {bits:.0f} bits of {own.bits} agree with "
    says += "the reference"
    if exact or difference.nature is Nature.FEWER_BITS:
        return PROBE.finding(units, Verdict.REDUCED_PRECISION, says, place)
    says = f"{says}; nor has the reference an exact result: rounding, or another function"
    return PROBE.finding(units, None, says, place, status=Status.REFUSED)


def _grainy(network: Comparison) -> bool:
    return any(d.nature is Nature.FEWER_BITS for d in network.narrow())


def _first_narrow(found: Examination) -> tuple[str, Difference] | None:
    """The innermost module, first in execution order, that loses bits by itself; "" the whole network.

    Fewer bits show on any inputs. An algorithm that cancels (a variance in one pass) loses them only where a
    large mean stands on a small spread, so the loss must stay when the inputs are centred. Not outputs in 16
    bits: what cancels in float32 shows in none of them, and what cancels in 16 bits was left in them.
    """
    local = found.local
    conditioned = False
    for name in local.rewritten():
        differences = [d for c in local.comparisons(name) for d in c.narrow()]
        if differences and local.agrees(name):
            if _stays(found, name, differences):
                return name, differences[0]
            conditioned = True
    narrow = found.network.narrow()
    return ("", narrow[0]) if narrow and not conditioned and _stays(found, "", narrow) else None


def _stays(found: Examination, name: str, seen: Sequence[Difference]) -> bool:
    """Whether the loss stays on centred inputs, and on every one of some pairs of samples.

    The pairs are for kinks: among the half a million pre-activations of a batch one float32 may well fall on
    the other side, and be far off in its gradients for it; among those of two samples it rarely does.
    """
    calls = found.local.calls[name] if name else [found.whole]
    outputs = any(d.pass_ in ("forward", "eval") for d in seen)
    return any(
        all(_narrow(found, name, trial) for trial in _trials(found, name, call, outputs)) for call in calls
    )


def _trials(found: Examination, name: str, call: Recorded, outputs: bool) -> Iterator[Recorded]:
    in_float32 = found.pair.precision is FLOAT32
    if in_float32 or not outputs:  # outputs go on across a kink, gradients leap
        yield centred(call)
    if not in_float32:  # two samples are too few
        yield inputs_near(call, torch.Generator().manual_seed(0))
        return
    for start in range(0, 2 * PAIRS, 2):
        part = slice(start, start + 2)
        if name:
            yield samples(call, part) or without_ties(call)
        else:
            batch = samples_of(found.batch, part)
            yield on_batch(found.pair, batch) if batch else without_ties(call)


def _narrow(found: Examination, name: str, call: Recorded) -> bool:
    pair, local = found.pair, found.local
    options = {"prefixes": local.prefixes(name), "seed": pair.seed}
    options |= {} if name else {"outputs": pair.outputs}
    try:
        compared = compare(*local.pair(name), call, pair.comparable, **options)
    except CannotRunError:
        return True
    return bool(compared.narrow())


PROBE = Probe(
    name=PRECISION,
    question="Against the exact result, is the candidate's float32 as near as the reference's?",
    threshold=HALFWAY_BITS,
    reason="halfway, in powers of two, between float32 and the next narrower format (TF32, float16: 2^13); "
    "in bf16 and fp16 4, see below",
    unit="times the reference's error",
    sees="TF32, float16, bfloat16, in any pass, by module",
    misses="an algorithm that merely cancels is told apart: the loss must stay on centred inputs, and on "
    "each of three pairs of samples (one float32 on the other side of a kink is no loss of bits)",
    order=70,
    ask=ask,
    asserted=True,
)
