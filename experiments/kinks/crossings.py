"""How many kinks two arms come to lie on different sides of: watched, counted, predicted to first order.

A pre-activation z of the reference is z + d in the control. Their signs differ where 0 lies between the
two, that is where z lies in an interval of length |d| that ends at 0. With a density p of z that is even
over such an interval, and d independent of z, the chance is p(0) |d|; over N pre-activations

    flips = N p(0) E|d|.

A max-pool window has another winner in the control where its gap g, the best value less the second best,
is overtaken by the change d of the gap: g + d < 0. With a density q of g at 0+ the chance is q(0) E[max(-d,
0)] = q(0) E|d| / 2 where d is as often up as down. Behind a ReLU a window may hold a single value that is
not 0. It loses its winner where that value falls to 0, and as often a dead window gains one: q(0) E|d|.
A dead window's winner is its first place, so no winner moves where the single value stands there.

Two places of a window that see the same pixels (a flat patch, a padded border) hold the same value but for
rounding, and either may win: a tie. It is counted apart: the gradient of the weights is the same whichever
wins. The second best is that of the places which see something else.

Of the two forms, ``product`` is the law as it stands above, with the mean |d| of the layer. ``near`` takes
the |d| of those pre-activations that lie near 0: it needs no independence of z and d.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlab.lockstep.arm import Arm

KINDS = ("signs", "winners")  # of what enters an activation, of a max-pool's windows
COUNTS = ("number", "changed", "ties", "product", "near", "product_half", "near_half")
# Half the width of the interval around 0 in which the density is taken, in units of the layer's rms (of a
# pre-activation) or mean gap. A normal density is lower by h²/6, 0.2 %, on average over it; a gap's,
# falling exponentially, by h/2, 5 %. ``*_half`` are taken over half of it, so that the difference shows.
WIDTH = 0.1


class Watch:
    """Hooks on what enters each activation and each max-pool of the arms.

    The reference's are kept until the control's of the same layer come by; what is left of both are seven
    numbers (``COUNTS``), on the device until ``fetched``: no synchronisation a step.

    Args:
        arms: of one network, each reference before its control.
    """

    def __init__(self, arms: Sequence[Arm]):
        self._step: int | None = None
        self._waiting: dict[tuple[str, str], Tensor] = {}
        self._sums: dict[tuple[str, str, int], Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        for arm in arms:
            arm.module.conv1.register_forward_pre_hook(partial(self._see_pixels, arm))
            for name, module in arm.module.named_modules():
                if isinstance(module, nn.ReLU | nn.SiLU | nn.MaxPool2d):
                    module.register_forward_pre_hook(partial(self._see, arm, name))

    def look(self, step: int, wanted: bool) -> None:
        """Whether to look at what runs next, and under which step to keep it."""
        self._step = step if wanted else None
        self._waiting.clear()

    @torch.no_grad()
    def _see_pixels(self, arm: Arm, module: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        """What the pool's windows stand on: the patches that the stem's convolution sees."""
        if self._step is not None and arm.role == "reference" and arm.module.pool is not None:
            self._seen[arm.dtype] = patch_keys(inputs[0], module.kernel_size[0], module.padding[0])

    @torch.no_grad()
    def _see(self, arm: Arm, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._step is None:
            return
        if arm.role == "reference":
            self._waiting[arm.dtype, name] = inputs[0].detach()
            return
        mine = self._waiting.pop((arm.dtype, name), None)
        if mine is None:  # the reference has blown up and runs no more
            return
        pool = isinstance(module, nn.MaxPool2d)
        seen = (self._seen[arm.dtype], module) if pool else ()
        counts = (winner_changes if pool else sign_changes)(mine, inputs[0], *seen)
        key = arm.dtype, KINDS[pool], self._step
        self._sums[key] = self._sums[key] + counts if key in self._sums else counts

    def fetched(self) -> dict[tuple[str, str, int], list[float]]:
        """(dtype, kind, step) -> ``COUNTS``, summed over layers."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))


def sign_changes(z: Tensor, other: Tensor) -> Tensor:
    """``COUNTS`` of the pre-activations ``z`` against ``other`` of the same shape: float64 [7]."""
    moved, size = (other - z).abs(), z.abs()
    scale = z.square().mean().sqrt()
    changed = ((z > 0) != (other > 0)).sum()
    found = [_by_density(size, moved, scale, h, 2 * h) for h in (WIDTH, WIDTH / 2)]
    return _counts(torch.full_like(changed, z.numel()), changed, torch.zeros_like(changed), found)


def winner_changes(x: Tensor, other: Tensor, seen: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """``COUNTS`` of the windows of ``pool`` over ``x`` [N, C, H, W] against ``other``: float64 [7].

    Args:
        seen: [N, 1, H, W], the same number where the same pixels are seen (``patch_keys``).
    """
    winners = [_winners(t, pool) for t in (x, other)]
    changed = winners[0] != winners[1]
    same = torch.eq(*(_gather(seen.flatten(2), w) for w in winners))
    values, others, keys = (_windows(t, pool) for t in (x, other, seen))
    best, at = values.max(2)
    tied = keys == _gather(keys, at.unsqueeze(2))
    second, at_second = values.masked_fill(tied, -torch.inf).max(2)
    gap = best - second
    moved = (_gather(others, at.unsqueeze(2)) - _gather(others, at_second.unsqueeze(2))).squeeze(2) - gap
    first = torch.isfinite(values[:1, :1]).to(torch.uint8).argmax(2)  # the same in every image and channel
    alive = (gap > 0) & (gap < torch.inf)  # inf: all see the same
    single, several = alive & (second == 0) & (at != first), alive & (second != 0)
    # one-sided, and of both directions for a single value: h; of one of two directions otherwise: 2 h
    found = [
        _by_density(gap, moved.abs(), _mean(gap, single), h, h, single)
        + _by_density(gap, moved.abs(), _mean(gap, several), h, 2 * h, several)
        for h in (WIDTH, WIDTH / 2)
    ]
    count = torch.full_like(changed.sum(), changed.numel())
    return _counts(count, changed.sum(), (changed & same).sum(), found)


def patch_keys(images: Tensor, kernel: int, padding: int) -> Tensor:
    """Of images [N, C, H, W]: a number for what a convolution of stride 1 sees at each place, [N, 1, H, W].

    Places with the same pixels have the same number, others another but for a chance of 2^-52 a pair. The
    bits are hashed as integers, so that no rounding comes in.
    """
    bits = F.pad(images.float(), (padding,) * 4).view(torch.int32).long()
    height, width = images.shape[2], images.shape[3]
    odd = np.random.default_rng(0).integers(2**31, size=(images.shape[1], kernel, kernel)) * 2 + 1
    found = torch.zeros_like(bits[:, 0, :height, :width])
    for (channel, i, j), factor in np.ndenumerate(odd):
        found += bits[:, channel, i : i + height, j : j + width] * int(factor)
    return ((found * 0x9E3779B97F4A7C1 >> 11) & (2**52 - 1)).double().unsqueeze(1)


def _by_density(
    size: Tensor, moved: Tensor, scale: Tensor, h: float, over: float, kept: Tensor | None = None
) -> Tensor:
    """Both forms of the prediction, [2]: share below ``h`` over ``over``, both in units of ``scale``."""
    near = size < h * scale
    if kept is not None:
        near &= kept
    mean = moved.mean() if kept is None else _mean(moved, kept)
    found = torch.stack([near.sum() * mean, (moved * near).nan_to_num(0.0).sum()])
    return torch.where(scale > 0, found / (over * scale), torch.zeros_like(found))


def _counts(number: Tensor, changed: Tensor, ties: Tensor, predicted: list[Tensor]) -> Tensor:
    return torch.cat([torch.stack([number, changed, ties]).double(), *(p.double() for p in predicted)])


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    """Over the kept ones, 0 where there are none; what is not kept may be infinite."""
    return torch.where(kept, values, torch.zeros_like(values)).sum() / kept.sum().clamp(min=1)


def _winners(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """[N, C, windows], the place of each winner in the flat image, as the network's own pool finds it."""
    found = F.max_pool2d(x, pool.kernel_size, pool.stride, pool.padding, return_indices=True)[1]
    return found.flatten(2)


def _windows(x: Tensor, pool: nn.MaxPool2d) -> Tensor:
    """[N, C, kernel², windows], -inf where a window reaches over the edge."""
    padded = F.pad(x, (pool.padding,) * 4, value=-torch.inf)
    unfolded = F.unfold(padded, pool.kernel_size, stride=pool.stride)
    return unfolded.view(*x.shape[:2], pool.kernel_size**2, -1)


def _gather(of: Tensor, index: Tensor) -> Tensor:
    """``of`` along its third dimension, the same for all channels where it has one."""
    return of.expand(-1, index.shape[1], *of.shape[2:]).gather(2, index)
