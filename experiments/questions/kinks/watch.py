"""Looks at the pre-activations of reference and control while they run, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from driftlab.arm import Arm
from experiments.questions.kinks.crossings import patch_keys, sign_changes, winner_changes

KINDS = ("signs", "winners")


class Watch:
    """Hooks on what enters each activation and each max-pool of the arms.

    The reference's are kept until the control's of the same layer come by; what is left of both are seven
    numbers (``crossings.COUNTS``), on the device until ``fetched``: no synchronisation a step.

    Args:
        arms: of one network, each reference before its control.
    """

    def __init__(self, arms: Sequence[Arm]):
        self._step: int | None = None
        self._waiting: dict[tuple[str, str], Tensor] = {}
        self._sums: dict[tuple[str, str, int], Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        for arm in arms:
            arm.module.conv1.register_forward_pre_hook(self._hook_on_pixels(arm))
            for name, module in arm.module.named_modules():
                kind = kind_of(module)
                if kind is not None:
                    module.register_forward_pre_hook(self._hook(arm, kind, name))

    def look(self, step: int, wanted: bool) -> None:
        """Whether to look at what runs next, and under which step to keep it."""
        self._step = step if wanted else None
        self._waiting.clear()

    def _hook_on_pixels(self, arm: Arm):
        """What the pool's windows stand on: the patches that the stem's convolution sees."""

        @torch.no_grad()
        def see(module: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
            if self._step is not None and arm.role == "reference" and arm.module.pool is not None:
                self._seen[arm.dtype] = patch_keys(inputs[0], module.kernel_size[0], module.padding[0])

        return see

    def _hook(self, arm: Arm, kind: str, name: str):
        @torch.no_grad()
        def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._step is None:
                return
            if arm.role == "reference":
                self._waiting[arm.dtype, name] = inputs[0].detach()
                return
            mine = self._waiting.pop((arm.dtype, name), None)
            if mine is None:  # the reference has blown up and runs no more
                return
            if isinstance(module, nn.MaxPool2d):
                counts = winner_changes(mine, inputs[0], self._seen[arm.dtype], module)
            else:
                counts = sign_changes(mine, inputs[0])
            self._add(arm.dtype, kind, counts)

        return see

    def _add(self, dtype: str, kind: str, counts: Tensor) -> None:
        key = dtype, kind, self._step
        self._sums[key] = self._sums[key] + counts if key in self._sums else counts

    def fetched(self) -> dict[tuple[str, str, int], list[float]]:
        """(dtype, kind, step) -> ``crossings.COUNTS``, summed over layers."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))


def kind_of(module: nn.Module) -> str | None:
    """ "signs" of what enters an activation, "winners" of a max-pool's windows, None for all else."""
    if isinstance(module, nn.ReLU | nn.SiLU):
        return "signs"
    return "winners" if isinstance(module, nn.MaxPool2d) else None
