"""A random direction in which every number of a point moves."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlab.finite.point import Point


def random_direction(point: Point, generator: torch.Generator) -> dict[str, Tensor]:
    """Every number of every leaf moves by between half and one and a half of the leaf's typical size.

    No number stands still, so that one wrong element shows; sizes differ, so that two wrong ones do not
    cancel. What is infinite, and the row that pads an embedding, stays.
    """
    typical = {n: _typical(t[point.movable[n]]) for n, t in point.base.items()}
    others = sorted(s for s in typical.values() if s)
    fallback = others[len(others) // 2] if others else 1.0
    signed = {n: _signed(t, generator) * (typical[n] or fallback) for n, t in point.base.items()}
    return {n: torch.where(point.movable[n], v, 0.0) for n, v in signed.items()}


def _typical(numbers: Tensor) -> float:
    most = float(numbers.abs().max()) if numbers.numel() else 0.0
    return most * float((numbers / most).abs().square().mean().sqrt()) if most else 0.0


def _signed(like: Tensor, generator: torch.Generator) -> Tensor:
    def drawn() -> Tensor:
        # on the CPU, as its generator is, whatever the default device
        sizes = 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        signs = 2.0 * torch.randint(0, 2, like.shape, generator=generator, device="cpu") - 1
        return (sizes * signs).to(like.device)

    return torch.complex(drawn(), drawn()) if like.is_complex() else drawn()
