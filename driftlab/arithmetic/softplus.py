"""Softplus without the end that torch gives it for float32's sake.

``softplus(x)`` is ``log(1 + exp(x))``, and torch goes on with ``x`` itself beyond a threshold of 20: what is
left out there, 2e-9, no float32 of that size can hold. float64 can, and whoever writes ``logaddexp(x, 0)`` or
``-logsigmoid(-x)`` instead would pass for another function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftlab.rounding import UNIT_ROUND_OFF


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """As ``aten::softplus``, float64 [...]; exact where the threshold is one that rounding hides."""
    if not _hidden(threshold):
        return torch.ops.aten.softplus(x, beta, threshold)
    return torch.logaddexp(x * beta, torch.zeros_like(x)) / beta


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """As ``aten::softplus_backward``, the same."""
    if not _hidden(threshold):
        return torch.ops.aten.softplus_backward(grad, x, beta, threshold)
    return grad * torch.sigmoid(x * beta)


def _hidden(threshold: float) -> bool:
    """Whether float32 rounds away what is left out: log1p(exp(-threshold)) beside the threshold."""
    return threshold > 0 and math.log1p(math.exp(-threshold)) < threshold * UNIT_ROUND_OFF["float32"]
