"""Backward passes other than autograd's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function


class Backward(Function):
    """The identity, whose gradient ``change`` alters: ``Backward.apply(x, change)``."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, with its gradient times ``factor``."""
    return Backward.apply(x, lambda gradient: gradient * factor)


def own_backward(forward: Callable[..., Tensor], backward: Callable) -> Callable[..., Tensor]:
    """``forward`` of tensors; ``backward(gradient, *inputs)`` gives the gradient of each of them, or None."""

    class Own(Function):
        @staticmethod
        def forward(ctx, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx, gradient: Tensor):
            return backward(gradient, *ctx.saved_tensors)

    return Own.apply
