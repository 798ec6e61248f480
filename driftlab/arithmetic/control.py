"""The control within one pass: what one unit in the last place makes of the reference itself.

A recurrent network of large gain grows a nudge to its own size within one forward pass, in float64 too. The
error of float32 is no yardstick there, since it is saturated: 2^-29 of it is far below what float64's own
rounding makes. So before a difference is held against the candidate, the reference is run once more with
every weight and every input that has a slope moved by one unit in the last place, in the same arithmetic.
What that makes is rounding, and so is a difference of up to ``HALFWAY`` times that: a rewrite rounds at every
step, not only at the first.

A network that is not chaotic answers with about as little as it was moved by, and its control is left out:
its rounding is told by float32, and a gradient that leaps with a move so small had equal entries to choose
from. Nor is one that jumps: an index that comes as a float, or a relative length that is compared with
positions, is the same for both networks, and no rounding moves it. The loss has no slope there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference, distance
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.network.calling import each_tensor, tensors_in
from driftlab.rounding import HALFWAY, UNIT_ROUND_OFF

COPIES = 3


def own_response(
    differences: Iterable[Difference],
    reference: nn.Module,
    recorded: Recorded,
    still: Passes,
    *,
    arithmetic: str,
    prefix: str,
    seed: int,
    evaluate: bool,
    chaotic_alone: bool = True,
) -> dict[tuple[str, str], float]:
    """(pass, name) of each difference -> how far a move by one unit carries the reference, at most.

    Zero with ``chaotic_alone`` where its forward pass is not chaotic: where it answers to one unit by less
    than ``HALFWAY`` units. Zero too where it does not run.

    Args:
        still: the reference's passes, in ``arithmetic`` or exact.
        prefix: of the differences' names of weights and buffers, before those of the module's own.
    """
    found = {(d.pass_, d.name): 0.0 for d in differences}
    sizes = {(d.pass_, d.name): d.size for d in differences if d.pass_ == "forward"}
    few = recorded.precision.unit_round_off
    chaotic = HALFWAY * (few if arithmetic == "float32" else UNIT_ROUND_OFF["float64"])
    sloped = _sloped(reference, recorded, arithmetic, seed)
    for copy in range(COPIES):
        unit = torch.Generator().manual_seed(copy)
        try:
            moved = run(reference, recorded, arithmetic, seed, evaluate, unit=unit, sloped=sloped)
        except CannotRunError:
            return dict.fromkeys(found, 0.0)
        for pass_, name in found:
            own, other = (p.tensors.get(pass_, {}).get(name.removeprefix(prefix)) for p in (still, moved))
            if own is not None and other is not None:
                found[pass_, name] = max(found[pass_, name], distance(other, own))
        if chaotic_alone and not any(found[key] > chaotic * size for key, size in sizes.items()):
            return dict.fromkeys(found, 0.0)
    return found


def _sloped(reference: nn.Module, recorded: Recorded, arithmetic: str, seed: int) -> dict[int, Tensor]:
    """By the ``id`` of each floating input where the loss has a slope; none where it cannot be asked."""
    given = {id(t): t for t in tensors_in((recorded.args, recorded.kwargs)) if t.is_floating_point()}
    if not given:
        return {}

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(id(tensor) in given)

    args, kwargs = each_tensor(leaf, (recorded.args, recorded.kwargs))
    try:
        found = run(reference, replace(recorded, args=args, kwargs=kwargs), arithmetic, seed, evaluate=False)
    except CannotRunError:
        return {}
    slopes = found.tensors["input gradient"].values()
    return {own: slope.to(given[own].device) != 0 for own, slope in zip(given, slopes, strict=True)}
