"""Do the two optimizers move folded weights alike, given the same gradients?

The network takes no part: both get the same random gradients, step after step, from equal weights that are
nowhere zero, whatever the two start from: how they move is what is compared. Update rules act on one entry at
a time (SGD, Adam, AdamW), so a folded update must agree but for rounding. One that looks at whole tensors (a
norm, as in LARS) does something else once a rewrite has cut a tensor.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.arithmetic.shadow import Shadow, held, shadow_arithmetic, shadowed
from driftlab.blame import theirs as called
from driftlab.fold import Fold, identity_fold
from driftlab.fold.layout import relative_distance
from driftlab.fold.unfold import put_weights_or_fold
from driftlab.network.calling import copied
from driftlab.network.pair import Pair
from driftlab.network.start import owner, setting_differences
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.rounding import HALFWAY, UNIT_ROUND_OFF
from driftlab.words import UPDATE, Finding, Place, Verdict

THRESHOLD = HALFWAY * UNIT_ROUND_OFF["float64"]


@dataclass(frozen=True)
class Update:
    """The first update in which a folded tensor went another way, or the reference's to infinity.

    Attributes:
        tensor: the reference's name of it.
        measured: relative distance after that update; NaN where the reference's is not finite.
        why: what explains it, in words, where something does.
        touched, compared: how many tensors went another way in that update, of how many that train.
    """

    tensor: str
    place: Place
    measured: float
    why: str | None
    touched: int = 1
    compared: int = 1

    @property
    def beyond(self) -> bool:
        """Whether the reference itself left all measure, so that nothing can be said."""
        return math.isnan(self.measured)


def wrong_update(pair: Pair, steps: int, in_shadow: bool = False) -> Update | None:
    """None where ``steps`` updates agree, or nothing can be compared.

    Args:
        in_shadow: the float32 path of both optimizers, computed in float64: what is left is no rounding.
    """
    mine, theirs, fold = copied(pair.reference), copied(pair.candidate), pair.fold
    mine, theirs = (m.to(pair.precision.dtype if in_shadow else torch.float64) for m in (mine, theirs))
    generator = torch.Generator().manual_seed(pair.seed)
    _leave_zero(mine, theirs, fold, generator)
    if in_shadow:
        mine, theirs = shadowed(mine), shadowed(theirs)
    with shadow_arithmetic() if in_shadow else nullcontext():
        both = (mine, called(pair.optimizer, mine)), (theirs, called(pair.candidate_optimizer, theirs))
        for step in range(steps):
            with _disable_current_modes():
                _same_gradients(mine, theirs, fold, generator)
            for _, stepper in both:
                called(stepper.step)
            with _disable_current_modes():
                apart = _apart(mine, theirs, fold)
            if found := _other_way(apart, step, fold, both):
                return found
    return None


def _other_way(apart: dict[str, float], step: int, fold: Fold, both: tuple) -> Update | None:
    name = next((n for n, off in apart.items() if math.isnan(off)), None)
    name = name or max(apart, key=apart.__getitem__, default=None)
    if name is None or apart[name] <= THRESHOLD:
        return None
    place = Place(owner(name), "update", step)
    if math.isnan(apart[name]):
        return Update(name, place, math.nan, None)
    why = setting_differences(*both, fold).get(name) or _why(name, fold, both)
    touched = sum(off > THRESHOLD for off in apart.values())
    moved = sum(p.requires_grad for n, p in both[0][0].named_parameters() if n in apart)
    return Update(name, place, apart[name], why, touched, max(moved, touched))


def _leave_zero(mine: nn.Module, theirs: nn.Module, fold: Fold, generator: torch.Generator) -> None:
    """Equal weights of their own size but nowhere zero, so that weight decay shows."""

    def values(name: str, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        scale = float(tensor.std(correction=0)) if tensor.numel() > 1 else 0.0
        return noise.to(tensor.device) * (scale or 0.1)

    put_weights_or_fold(mine, theirs, fold, values)


def _same_gradients(mine: nn.Module, theirs: nn.Module, fold: Fold, generator: torch.Generator) -> None:
    gradients, sparse = {}, _sparse(mine) | _sparse(theirs)
    for name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        gradients[name] = 0.1 * noise.to(parameter.device)
        parameter.grad = _as(parameter, gradients[name], sparse) if parameter.requires_grad else None
    folded = fold(gradients)
    for name, parameter in mine.named_parameters():
        has = parameter.requires_grad and name in folded
        parameter.grad = _as(parameter, folded[name], sparse) if has else None


def _sparse(module: nn.Module) -> set[int]:
    """Parameters whose gradients come sparse: some optimizers take no others, and most others none."""
    tables = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    return {id(m.weight) for m in tables}


def _as(parameter: Tensor, gradient: Tensor, sparse: set[int]) -> Tensor:
    """A gradient of the parameter's own kind."""
    values = gradient.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(parameter, Shadow):
        return Shadow(values, parameter.dtype)
    return values.to(parameter.dtype).to_sparse(1) if id(parameter) in sparse else values


def _apart(mine: nn.Module, theirs: nn.Module, fold: Fold) -> dict[str, float]:
    """How far each tensor is off; NaN of one that is not finite in the reference."""
    folded = fold({n: held(p).detach() for n, p in theirs.named_parameters()})
    apart = {}
    for name, parameter in mine.named_parameters():
        if name in folded:
            own = held(parameter).detach()
            off = float(relative_distance(folded[name], own))
            if not math.isfinite(off):  # only then: a GPU is waited for at each answer
                known = bool(own.isfinite().all())
                off = math.nan if not known else off if bool(folded[name].isfinite().all()) else math.inf
            apart[name] = off
    return apart


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


# The network takes no part, so many updates cost little; what strikes late has a longer time to show.
STEPS = 50


def ask(found: Examination) -> list[Finding]:
    update = wrong_update(found.pair, STEPS)
    if update is None:
        return [PROBE.finding(0.0, None, f"they do, over {STEPS} updates")]
    if update.beyond:
        they_do = f"they do, over {update.place.step} updates"
        return [PROBE.finding(None, None, f"{they_do}: in the next the reference's weights overflow")]
    in_shadow = wrong_update(found.pair, STEPS, in_shadow=True)
    fewer_bits = in_shadow is None or in_shadow.beyond
    if (wavering := _wavers(found)) is not None:
        says = "given the same gradients twice, the candidate's optimizer does not repeat itself"
        where = wavering.place
        return [PROBE.finding(wavering.measured, Verdict.NONDETERMINISTIC, says, where, threshold=0.0)]
    why = f": {update.why}" if update.why else ""
    goes = f"{update.tensor} goes another way in update {update.place.step}"
    how_many = f"{update.touched} of {update.compared} tensors do"
    says = f"{goes}, {update.measured:.2g} (relative) off ({how_many}){why}"
    if fewer_bits:
        says += "; with the rounding taken away it does not"
    supports = Verdict.REDUCED_PRECISION if fewer_bits else Verdict.BUG
    return [PROBE.finding(update.measured, supports, says, update.place)]


def _wavers(found: Examination) -> Update | None:
    """The candidate beside itself."""
    pair = found.pair
    alone = identity_fold(pair.candidate)
    twice = replace(pair, reference=pair.candidate, optimizer=pair.candidate_optimizer, fold=alone)
    wavering = wrong_update(twice, STEPS)
    return None if wavering is None or wavering.beyond else wavering


PROBE = Probe(
    name=UPDATE,
    question="Given the same gradients, do the two optimizers move folded weights alike?",
    threshold=THRESHOLD,
    reason="2^14.5 units of float64's round-off",
    unit="relative difference",
    sees="other or missing settings, late changes, rules that look at whole tensors (LARS, clipping by "
    "tensor) once a tensor is split; state in fewer bits, by the same in shadow execution; an optimizer that "
    "does not repeat itself",
    misses=f"rules that depend on the loss; what sets in after {STEPS} updates",
    order=80,
    ask=ask,
    off_path=True,
)
