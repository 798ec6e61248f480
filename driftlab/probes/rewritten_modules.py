"""Do the rewritten modules agree beyond what the network fed them?"""

from __future__ import annotations

from driftlab.arithmetic.beyond_inputs import Rewritten, look_beyond
from driftlab.arithmetic.local import Local
from driftlab.network.calling import tensors_in
from driftlab.probes.determinism import wavers
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.words import Finding, Place, Verdict


def ask(found: Examination) -> list[Finding]:
    """Asked of modules that agree on their network's own inputs, so that the borders are the same."""
    local = found.local
    agreeing = [n for n in local.rewritten() if local.agrees(n)]
    if not agreeing or not found.comparable:
        return [PROBE.not_applicable("no rewritten module stands alone")]
    seen = look_beyond(local, _kinds(local, agreeing))
    if not seen.faults:
        return [PROBE.finding(0.0, None, _agreed(seen, len(agreeing)))]
    fault = seen.faults[0]
    if (wavering := wavers(found, fault.module)) is not None:
        return [wavering]
    many = f", and so in {len({f.module for f in seen.faults})} modules" if len(seen.faults) > 1 else ""
    says = (
        f"{{place}}: {fault.relative:.2g} (relative) off on {fault.inputs}{many}; "
        "a network that never meets such inputs is not touched by it"
    )
    return [PROBE.finding(fault.relative, Verdict.BUG, says, Place(fault.module, fault.pass_, 0))]


def _kinds(local: Local, names: list[str]) -> list[str]:
    """One module of each kind: the same classes with the same settings, fed the same shapes."""
    kinds: dict[str, str] = {}
    for name in names:
        shapes = [t.shape for t in tensors_in(local.calls[name][0].args)]
        kinds.setdefault(f"{local.pair(name)} {shapes}", name)
    return list(kinds.values())


def _agreed(seen: Rewritten, modules: int) -> str:
    parts = [f"{modules} module{'s' * (modules != 1)}: {seen.exact} integer checks equal bit for bit"]
    if seen.inexact:
        why = "constants that are no binary fractions, or fewer bits"
        parts.append(f"{seen.inexact} not exact but within rounding ({why})")
    if seen.inapplicable:
        parts.append(f"{len(seen.inapplicable)} not exact in integers in the reference either")
    if seen.unplaced:
        parts.append(f"{len(seen.unplaced)} with weights that integers cannot stand for in both")
    parts.append(f"{seen.other} comparisons at other sizes and values within rounding")
    if seen.untold:
        parts.append(f"{seen.untold} in float32 alone, which does not tell rounding from a fault")
    parts += [f"{name} keeps {bits} bits of its operands" for name, bits in seen.bits.items()]
    if seen.other_weights:
        parts.append(f"with other weights than its own {seen.other_weights[0]} is another function")
    parts += [f"the candidate refuses {r}" for r in seen.refused[:3]]
    return "; ".join(parts)


PROBE = Probe(
    name="rewritten_modules",
    question="Do the rewritten modules agree on small integers, bit for bit, and at other sizes and values?",
    threshold=0.0,
    reason="sums of small integers are exact in any order; at other values as `function`, of what float32 "
    "has room for",
    unit="relative difference",
    sees="each rewritten module that agrees so far, and the bits that its operands keep: faults at odd and "
    "oblong sizes, beyond a threshold (values eight times as large, of the other sign, moved), for zeros",
    misses="thresholds further out; integers in place of its own weights accuse nobody alone (a padding row "
    "may have to be zero)",
    order=50,
    ask=ask,
    off_path=True,
    asserted=True,
)
