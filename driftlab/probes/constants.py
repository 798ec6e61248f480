"""Constants that a candidate stores in float32, where the reference computes them: half a unit in the last place off.

The control is to move every such stored value by one unit in its last place. What differs by no more than that
moves the result is what rounding the constants once makes of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from driftlab.probes.arithmetic import CannotRun, Passes, Recorded, run
from driftlab.probes.comparison import Difference, distance
from driftlab.subject import Subject

# A difference of float32's own unit round-off and not much more; anything larger is no stored rounding.
LARGEST = 2.0**-20
# How much nearer than the control's response the difference must be: the control moves each value by a whole
# unit, rounding by half of one at most, in directions that may add up otherwise.
WITHIN = 2.0
TRIALS = 3


def rounded_constants(subject: Subject, whole: Recorded, wrong: list[Difference]) -> str | None:
    """What explains ``wrong``, in words; None where stored constants do not."""
    if any(not d.relative < LARGEST for d in wrong):
        return None
    named = list(_own_names(subject.candidate, subject.fold.unused, subject.reference))
    if not named:
        return None
    try:
        still = run(subject.candidate, whole, "shadow", subject.seed)
        moved = [
            run(_moved(subject.candidate, named, trial), whole, "shadow", subject.seed)
            for trial in range(TRIALS)
        ]
    except CannotRun:
        return None
    for d in wrong:
        response = max(_response(still, m, d.pass_) for m in moved)
        if not d.apart.get("shadow", 0.0) <= WITHIN * response:
            return None
    listed = ", ".join(named[:3])
    return f"{wrong[0].relative:.1g} (relative): values that it stores in float32 ({listed}) and the reference does not"


def _response(still: Passes, moved: Passes, pass_: str) -> float:
    pairs = ((tensor, moved.tensors[pass_].get(name)) for name, tensor in still.tensors[pass_].items())
    return max((distance(b, a) for a, b in pairs if b is not None), default=0.0)


def _own_names(candidate: nn.Module, unused: tuple[str, ...], reference: nn.Module) -> Iterator[str]:
    """Floating tensors of the candidate that stand for none of the reference's: parameters, buffers, attributes."""
    tensors = {**dict(candidate.named_parameters()), **dict(candidate.named_buffers())}
    yield from (n for n in unused if n in tensors and tensors[n].is_floating_point())
    known = {f"{p}.{k}" for p, m in reference.named_modules() for k in vars(m)}
    for prefix, module in candidate.named_modules():
        for key, value in vars(module).items():
            name = f"{prefix}.{key}"
            if isinstance(value, Tensor) and value.is_floating_point() and name not in known:
                yield name.removeprefix(".")


def _moved(candidate: nn.Module, names: list[str], seed: int) -> nn.Module:
    """A copy with each of the tensors ``names`` moved by one unit in the last place, this way or that."""
    twin, generator = copy.deepcopy(candidate), torch.Generator().manual_seed(seed)
    for name in names:
        prefix, _, key = name.rpartition(".")
        tensor = getattr(twin.get_submodule(prefix), key)
        up = torch.rand(tensor.shape, generator=generator).to(tensor.device) < 0.5
        with torch.no_grad():
            infinite = torch.full_like(tensor, torch.inf)
            tensor.copy_(torch.nextafter(tensor, torch.where(up, infinite, -infinite)))
    return twin
