"""Do the rewritten modules agree beyond what the network fed them?"""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from driftlab.examination import Examination
from driftlab.findings.determinism import wavers
from driftlab.probes.locating import Local
from driftlab.probes.rewritten import Rewritten, examine
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Do the rewritten modules agree on small integers, bit for bit, and at other sizes and values?"


def ask_rewritten_modules(found: Examination) -> None:
    """Asked of modules that agree on their network's own inputs, so that the borders are the same."""
    local = found.local
    agreeing = [n for n in local.rewritten() if local.comparisons(n) and local.wrong(n, few=True) is None]
    if not agreeing or not found.comparable:
        found.add(
            Evidence("rewritten_modules", QUESTION, None, 0.0, None, "no rewritten module stands alone")
        )
        return
    seen = examine(local, _kinds(local, agreeing))
    if not seen.faults:
        found.add(Evidence("rewritten_modules", QUESTION, 0.0, 0.0, None, _agreed(seen, len(agreeing))))
        return
    fault = seen.faults[0]
    if wavers(found, fault.module):
        return
    place = Place(fault.module, fault.pass_, 0)
    many = f", and so in {len({f.module for f in seen.faults})} modules" if len(seen.faults) > 1 else ""
    reading = (
        f"{place}: {fault.relative:.2g} (relative) off on {fault.inputs}{many}; "
        "a network that never meets such inputs is not touched by it"
    )
    found.add(Evidence("rewritten_modules", QUESTION, fault.relative, 0.0, Verdict.BUG, reading), place)


def _kinds(local: Local, names: list[str]) -> list[str]:
    """One module of each kind: the same classes with the same settings, fed the same shapes."""
    kinds: dict[str, str] = {}
    for name in names:
        shapes = [t.shape for t in pytree.tree_leaves(local.calls[name][0].args) if isinstance(t, Tensor)]
        kinds.setdefault(f"{local.pair(name)} {shapes}", name)
    return list(kinds.values())


def _agreed(seen: Rewritten, modules: int) -> str:
    parts = [f"{modules} module{'s' * (modules != 1)}: {seen.exact} integer checks equal bit for bit"]
    if seen.inexact:
        parts.append(
            f"{seen.inexact} not exact but within rounding (constants that are no binary fractions, or "
            f"fewer bits)"
        )
    if seen.inapplicable:
        parts.append(f"{len(seen.inapplicable)} not exact in integers in the reference either")
    if seen.unplaced:
        parts.append(f"{len(seen.unplaced)} with weights that integers cannot stand for in both")
    parts.append(f"{seen.other} comparisons at other sizes and values within rounding")
    parts += [f"{name} keeps {bits} bits of its operands" for name, bits in seen.bits.items()]
    if seen.other_weights:
        parts.append(f"with other weights than its own {seen.other_weights[0]} is another function")
    parts += [f"the candidate refuses {r}" for r in seen.refused[:3]]
    return "; ".join(parts)
