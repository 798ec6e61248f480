"""Controls: the reference, moved by the smallest amount that there is, and by nothing else.

In float32 and float64 weights are moved by one unit in the last place: one of them, every one, and every one
after each update. A rewrite rounds otherwise in every operation, and the three span what that makes.

In 16 bits a move of the weights is no such thing. One unit of a float32 weight vanishes where the weight is
cast. One of bfloat16 moves it by 2^-8, which no update takes back, while a rewrite's weights are the
reference's to the last bit until gradients that are rounded otherwise have moved them. So the weights stay,
and each step *computes* with every weight one unit of the dtype it is computed in away from itself, up or
down by chance, anew at each step. That is as much as one more rounding of every product makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from driftlab.arithmetic.units import unless_zero
from driftlab.fold.layout import index_of
from driftlab.network.calling import step_seed
from driftlab.words import DiagnoseError

if TYPE_CHECKING:
    from driftlab.lockstep.arm import Arm


def nudge(module: nn.Module, seed: int) -> str:
    """Move one weight of ``module`` to the next number of its own dtype, away from zero, in place.

    The weight is drawn by ``seed`` among the non-zero entries of the parameters with two dimensions
    or more, so that the same one is moved whatever the dtype. Returns its name, ``layer.weight[123]``.

    Raises:
        DiagnoseError: where no parameter has a non-zero entry.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(module.named_parameters())
    choices = [(n, p) for n, p in parameters if p.dim() > 1 and bool(p.any())] or [
        (n, p) for n, p in parameters if bool(p.any())
    ]
    if not choices:
        raise DiagnoseError("the control cannot be nudged: the network has no parameter that is not zero")
    sizes = torch.tensor([p.numel() for _, p in choices], dtype=torch.float64)
    name, parameter = choices[int(torch.multinomial(sizes, 1, generator=generator))]
    flat = parameter.detach().reshape(-1)
    nonzero = flat.nonzero().flatten()
    index = int(nonzero[int(torch.randint(len(nonzero), (1,), generator=generator))])
    position = index_of(index, parameter.shape)
    with torch.no_grad():
        parameter[position] = torch.nextafter(flat[index], flat[index] * torch.inf)
    return f"{name}[{index}]"


@torch.no_grad()
def nudge_all(module: nn.Module, generator: torch.Generator) -> None:
    """Move every weight that is not zero by one ulp, up or down by chance, in place."""
    for parameter in module.parameters():
        parameter.copy_(unless_zero(parameter, generator))


@contextmanager
def computed_one_unit_off(module: nn.Module, computed_in: torch.dtype, seed: int) -> Iterator[None]:
    """Inside, every weight that is not zero is one unit of ``computed_in`` off; behind it, what it was."""
    generator = torch.Generator().manual_seed(seed)
    kept = [(p, p.detach().clone()) for p in module.parameters()]
    with torch.no_grad():
        for parameter, own in kept:
            parameter.copy_(unless_zero(own, generator, computed_in))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, own in kept:
                parameter.copy_(own)


@dataclass(frozen=True)
class Control:
    """The reference moved by one ulp: in one weight, in ``every`` weight, ``again`` after each update.

    With ``computing`` no weight is moved, and each step computes with every one of them moved.
    """

    role: str
    every: bool = False
    again: bool = False
    computing: bool = False

    @property
    def longest(self) -> float:
        """Updates after which it ends: what the larger ensemble showed by then stands for the rest."""
        return ENSEMBLE_STEPS if self.every else math.inf

    def move(self, arm: Arm, seed: int) -> None:
        """Nudge the arm's weights, now and as often as this control does."""
        if self.computing:
            computed_in = arm.precision.computes_in
            arm.otherwise = lambda step: computed_one_unit_off(arm.module, computed_in, step_seed(seed, step))
            return
        generator = torch.Generator().manual_seed(seed)
        if self.every:
            nudge_all(arm.module, generator)
        else:
            nudge(arm.module, seed)
        arm.after_update = (lambda: nudge_all(arm.module, generator)) if self.again else None


ENSEMBLE_STEPS = 9
ONE_WEIGHT = Control("control")
# Rounding as a rewrite makes it: otherwise in every weight, and at every step.
ENSEMBLE = (ONE_WEIGHT, Control("control_all", every=True), Control("control_each", every=True, again=True))
IN_16_BITS = Control("control", computing=True)
