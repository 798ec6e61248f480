"""Norms through whose statistics no gradient goes back, as where they are computed without autograd."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from driftlab.mistakes.norms import NORMS, has_own_statistics, written_out
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.scopes import Scopes


class HeldStatistics(TorchFunctionMode):
    """In the modules ``held`` the statistics of norms are taken for constants.

    Attributes:
        scopes: the modules that norm, in their order.
    """

    def __init__(self, now: Scopes, held: frozenset[str] = frozenset()):
        super().__init__()
        self._now, self._held = now, held
        self.scopes: dict[str, None] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        given = call.given() if call.name in NORMS else None
        if not given or not given["input"].requires_grad or not has_own_statistics(call.name, given):
            return call.run()
        self.scopes[self._now.now] = None
        if self._now.now not in self._held:
            return call.run()
        eps = torch.finfo(given["input"].dtype).eps if given["eps"] is None else given["eps"]
        return written_out(call, lambda spread: (spread + eps).sqrt(), held=True)
