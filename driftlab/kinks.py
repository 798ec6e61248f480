"""Sign flips: which side of a kink each pre-activation lies on, and where two arms disagree.

A ReLU passes a pre-activation or drops it, a max-pool passes one of its window. Between kinks a network
is smooth and rounding errors grow slowly; where a pre-activation of one arm crosses a kink that the
other's does not, the gradient jumps. The recorder sees the calls themselves, modules and functions
alike, so a rewritten network needs no hooks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SIGN_KINKS = {
    F.relu,
    F.relu_,
    F.relu6,
    F.leaky_relu,
    F.leaky_relu_,
    F.prelu,
    F.hardtanh,
    F.threshold,
    torch.relu,
    torch.relu_,
    torch.prelu,
    Tensor.relu,
    Tensor.relu_,
}
_WINNER_KINKS = {
    torch.max_pool1d: F.max_pool1d_with_indices,
    torch.max_pool2d: F.max_pool2d_with_indices,
    torch.max_pool3d: F.max_pool3d_with_indices,
    F.max_pool1d: F.max_pool1d_with_indices,
    F.max_pool2d: F.max_pool2d_with_indices,
    F.max_pool3d: F.max_pool3d_with_indices,
    F.adaptive_max_pool1d: F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d: F.adaptive_max_pool2d_with_indices,
}


class KinkRecorder(TorchFunctionMode):
    """Context manager: while it is open, every ReLU-like and max-pool call leaves the side it took.

    ``sides`` holds a tensor a call, in order of execution: for a ReLU bool, True where the
    pre-activation is positive; for a max-pool int64, the index of the winner in each window.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SIGN_KINKS:
            self.sides.append((args[0] if args else kwargs["input"]).detach() > 0)
        elif func in _WINNER_KINKS:
            self.sides.append(_winners(func, args, kwargs))
        return func(*args, **kwargs)


def _winners(func, args, kwargs) -> Tensor:
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    detached_kwargs = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    with torch.no_grad():
        return _WINNER_KINKS[func](*detached, **detached_kwargs)[1]


def sign_flips(sides: list[Tensor], against: list[Tensor]) -> Tensor | None:
    """How many pre-activations lie on different sides: a float64 scalar on their device.

    None where the two cannot be paired, because a rewrite changed the number or shapes of the kinks.
    """
    if [s.shape for s in sides] != [s.shape for s in against]:
        return None
    if not sides:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([(a != b).sum() for a, b in zip(sides, against, strict=True)]).sum().double()
