"""Does each network repeat itself? Asked before all else, and again before anybody is accused."""

from __future__ import annotations

import torch
from torch import nn

from driftlab.examination import Examination
from driftlab.probes.arithmetic import Recorded
from driftlab.probes.determinism import Wobble, repeats
from driftlab.verdict import Evidence, Place, Verdict

QUESTION = "Does each network repeat itself, bit for bit, from the same state, batch and random seed?"
# Before an accusation. A fault that strikes one call in eight stays hidden in one case in ten thousand.
AGAIN_NETWORK, AGAIN_MODULE = 8, 64


def ask_determinism(found: Examination) -> None:
    subject = found.subject
    for role in ("reference", "candidate"):
        network = getattr(subject, role)
        wobble = repeats(network, found.whole, subject.seed)
        if wobble and is_compiled(network):  # its first calls are what it is optimised by
            wobble = repeats(network, found.whole, subject.seed)
        if wobble:
            return _add(found, role, wobble)
    found.add(Evidence("determinism", QUESTION, 0.0, 0.0, None, "both do"))


def is_compiled(network: nn.Module) -> bool:
    """Whether TorchScript or ``torch.compile`` has a part in it."""
    return any(isinstance(m, torch.jit.ScriptModule) or hasattr(m, "_orig_mod") for m in network.modules())


def _add(found: Examination, role: str, wobble: Wobble) -> None:
    known = found.subject.reference_name(wobble.module) if role == "candidate" else wobble.module
    place = Place(known, wobble.pass_, 0)
    reading = (
        f"the {role} does not: {place} moves by {wobble.floor:.2g} (relative) from run to run, "
        "so that no difference between the two means anything"
    )
    found.add(Evidence("determinism", QUESTION, wobble.floor, 0.0, Verdict.NONDETERMINISTIC, reading), place)


def wavers(found: Examination, module: str | None) -> bool:
    """Whether the candidate, about to be accused in ``module``, does not repeat itself after all; says so."""
    subject = found.subject
    wobble = repeats(subject.candidate, found.whole, subject.seed, AGAIN_NETWORK)
    if wobble is None and module and found.local.calls.get(module):
        call: Recorded = found.local.calls[module][0]
        wobble = repeats(found.local.pair(module)[1], call, subject.seed, AGAIN_MODULE)
        wobble = wobble and Wobble(wobble.pass_, subject.pairs[module], wobble.floor)
    if wobble is None:
        return False
    found.findings = [f for f in found.findings if f.evidence.probe != "determinism"]
    _add(found, "candidate", wobble)
    return True
