"""Do both optimizers do the same to their networks' tensors, given the same gradients?

The network takes no part: both get the same random gradients, step after step, from weights that are nowhere
zero. Update rules act on one entry at a time (SGD, Adam, AdamW), so a folded update must agree but for
rounding. One that looks at whole tensors (a norm, as in LARS) does something else once a rewrite has cut a
tensor.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.copying import copied
from driftlab.distance import relative_distance
from driftlab.evidence import HALFWAY, UNIT_ROUND_OFF
from driftlab.fold import Fold, FoldError
from driftlab.probes.same_start import owner, setting_differences
from driftlab.shadow import Shadow, held, shadow_arithmetic, shadowed
from driftlab.subject import Subject
from driftlab.unfold import put_weights
from driftlab.verdict import Place

THRESHOLD = HALFWAY * UNIT_ROUND_OFF["float64"]


@dataclass(frozen=True)
class Update:
    """The first update in which a folded tensor went another way.

    Attributes:
        tensor: the reference's name of it.
        measured: relative distance after that update.
        why: what explains it, in words, where something does.
    """

    tensor: str
    place: Place
    measured: float
    why: str | None


def wrong_update(subject: Subject, steps: int, in_shadow: bool = False) -> Update | None:
    """None where ``steps`` updates agree, or nothing can be compared.

    Args:
        in_shadow: the float32 path of both optimizers, computed in float64: what is left is no rounding.
    """
    mine, theirs, fold = copied(subject.reference), copied(subject.candidate), subject.fold
    mine, theirs = (m.float() if in_shadow else m.double() for m in (mine, theirs))
    generator = torch.Generator().manual_seed(subject.seed)
    _leave_zero(mine, theirs, fold, generator)
    if in_shadow:
        mine, theirs = shadowed(mine), shadowed(theirs)
    with shadow_arithmetic() if in_shadow else nullcontext():
        both = (mine, subject.optimizer(mine)), (theirs, subject.candidate_optimizer(theirs))
        for step in range(steps):
            with _disable_current_modes():
                _same_gradients(mine, theirs, fold, generator)
            for _, stepper in both:
                stepper.step()
            with _disable_current_modes():
                worst = _furthest(mine, theirs, fold)
            if worst and not worst[1] <= THRESHOLD:
                name, off = worst
                explained = setting_differences(*both, fold)
                why = explained.get(name) or _why(name, fold, both)
                return Update(name, Place(owner(name), "update", step), off, why)
    return None


def _leave_zero(mine: nn.Module, theirs: nn.Module, fold: Fold, generator: torch.Generator) -> None:
    """Weights of their own size but nowhere zero, so that weight decay shows; or as they are."""

    def values(name: str, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        scale = float(tensor.std(correction=0)) if tensor.numel() > 1 else 0.0
        return noise.to(tensor.device) * (scale or 0.1)

    try:
        put_weights(mine, theirs, fold, values)
    except FoldError:
        return


def _same_gradients(mine: nn.Module, theirs: nn.Module, fold: Fold, generator: torch.Generator) -> None:
    gradients = {}
    for name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        gradients[name] = 0.1 * noise.to(parameter.device)
        parameter.grad = _as(parameter, gradients[name]) if parameter.requires_grad else None
    folded = fold(gradients)
    for name, parameter in mine.named_parameters():
        has = parameter.requires_grad and name in folded
        parameter.grad = _as(parameter, folded[name]) if has else None


def _as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient of the parameter's own kind."""
    values = gradient.detach().clone(memory_format=torch.contiguous_format)
    return Shadow(values, parameter.dtype) if isinstance(parameter, Shadow) else values


def _furthest(mine: nn.Module, theirs: nn.Module, fold: Fold) -> tuple[str, float] | None:
    folded = fold({n: held(p).detach() for n, p in theirs.named_parameters()})
    apart = {
        n: float(relative_distance(folded[n], held(p).detach()))
        for n, p in mine.named_parameters()
        if n in folded
    }
    return max(apart.items(), key=lambda item: item[1], default=None)


def _why(name: str, fold: Fold, both: tuple) -> str | None:
    sources = sorted(fold.sources(name))
    if len(sources) > 1:
        cut = " and ".join(sources[:2]) + (f" and {len(sources) - 2} more" if len(sources) > 2 else "")
        return (
            f"the update rule looks at whole tensors, and {name} is {cut} in the candidate: "
            "the settings are equal, the algorithm is not"
        )
    kinds = [type(stepper).__name__ for _, stepper in both]
    return f"the optimizers are {kinds[0]} and {kinds[1]}" if kinds[0] != kinds[1] else None
