"""Norms through whose statistics no gradient goes back, as where they are computed without autograd."""

from __future__ import annotations

from torch import Tensor

from driftlab.mistakes.call_modes import InPlaces
from driftlab.mistakes.norms import NORMS, Parts, has_own_statistics, written_out
from driftlab.mistakes.torch_call import Call


class HeldStatistics(InPlaces):
    """The statistics of norms are taken for constants there."""

    mean_too = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        given = call.given() if call.name in NORMS else None
        if not given or not given["input"].requires_grad or not has_own_statistics(call.name, given):
            return call.run()
        if not self.changes():
            return call.run()
        return written_out(call, parts=self._held)

    def _held(self, parts: Parts) -> Parts:
        x, mean, spread = parts
        return x, mean.detach() if self.mean_too and isinstance(mean, Tensor) else mean, spread.detach()


class HeldDeviation(HeldStatistics):
    """What norms divide by is, and the mean is not."""

    mean_too = False
