"""Faults that set in later: both networks on the candidate's weights, at any step of a run.

At a later step drift has parted the weights, so they are made equal: the reference gets the candidate's, by
the fold. Then the probes of one step serve again, with no drift in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from driftlab.arm import Arm
from driftlab.copying import copied
from driftlab.distance import relative_distance
from driftlab.examination import Examination
from driftlab.lockstep import step_seed
from driftlab.subject import Subject
from driftlab.unfold import floating_tensors
from driftlab.verdict import Place


class Run(Protocol):
    """A float32 training of both networks that can be walked through step by step."""

    steps: int

    def walk(self) -> Iterator[int]: ...

    def arm(self, name: str) -> Arm: ...

    def batch(self, step: int) -> tuple[object, object]: ...


class Snapshots:
    """Both networks as a run had them before each of its steps."""

    def __init__(self, subject: Subject, run: Run):
        self.subject, self._run = subject, run
        self._kept: dict[int, tuple[nn.Module, nn.Module]] = {}
        for step in run.walk():
            pair = (run.arm(f"{role}.float32").module for role in ("reference", "candidate"))
            self._kept[step] = tuple(_copied(m) for m in pair)

    def at(self, step: int) -> Examination:
        """Both on the weights that the candidate has before ``step``, fed that step's batch."""
        subject = in_step(self.subject, *self._kept[step])
        # random layers as lockstep seeds them at this step
        return Examination(replace(subject, seed=step_seed(subject.seed, step)), self._run.batch(step))

    def moved_apart(self, step: int) -> Place:
        """The module whose weights the update before ``step`` parted most, in units of their own size."""
        mine, theirs = self._kept[step]
        folded = self.subject.comparable(dict(theirs.named_parameters()))
        apart = {
            n: float(relative_distance(folded[n].detach(), p.detach()))
            for n, p in mine.named_parameters()
            if n in folded
        }
        name = max(apart, key=apart.__getitem__)
        return Place(name.rpartition(".")[0], "update", max(0, step - 1))

    def first_wrong(self, last: int) -> int:
        """The first step whose pair differs by more than rounding, given that ``last`` does: by bisection."""
        low, high = 0, min(last, max(self._kept))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_wrong(self.at(middle)) else (middle + 1, high)
        return high


def _copied(module: nn.Module) -> nn.Module:
    twin = copied(module)
    twin.zero_grad(set_to_none=True)
    return twin


def is_wrong(found: Examination) -> bool:
    return bool(found.network.wrong())


def in_step(subject: Subject, reference: nn.Module, candidate: nn.Module) -> Subject:
    """The pair with the reference on the candidate's weights and buffers, where the fold gives them."""
    reference, candidate = _copied(reference), _copied(candidate)
    given = subject.fold(floating_tensors(candidate))
    with torch.no_grad():
        for name, tensor in floating_tensors(reference).items():
            if name in given:
                tensor.copy_(given[name])
    return replace(subject, reference=reference, candidate=candidate)
