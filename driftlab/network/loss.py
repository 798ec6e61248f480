"""The loss: its tensors in the arithmetic that it is asked in, and what it must return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.blame import theirs
from driftlab.words import DiagnoseError

Loss = Callable[[Any, Any], Tensor]


def loss_in(loss: Loss, module: Callable[[nn.Module], nn.Module], values: Callable[[object], object]) -> Loss:
    """``loss`` with its tensors in another arithmetic: a module's own, or those that a ``partial`` holds.

    A copy, so that what a loss keeps from call to call stays with one network.

    Args:
        module, values: put a module, or a structure of tensors, into the arithmetic, as copies.
    """
    if isinstance(loss, MeanLoss):
        return MeanLoss(loss_in(loss.each, module, values))
    if isinstance(loss, nn.Module):
        return module(loss)
    if isinstance(loss, partial):
        held: Any = values((loss.args, loss.keywords))
        return partial(loss.func, *held[0], **held[1])
    return loss


class MeanLoss:
    """Of several batches whose gradients one update gathers: the mean of their losses."""

    def __init__(self, each: Loss):
        self.each = each

    def __call__(self, outputs: Sequence[Any], targets: Sequence[Any]) -> Tensor:
        losses = [one_number(theirs(self.each, o, t)) for o, t in zip(outputs, targets, strict=True)]
        return torch.stack(losses).mean()


_OWN = "_driftlab_own_loss"


def carry_loss(network: nn.Module, loss: Loss) -> None:
    """Let ``network``, and every copy of it, be trained on a loss of its own."""
    network.__dict__[_OWN] = [loss]  # in a list, so that a loss module is no part of the network


def own_loss(network: nn.Module) -> Loss | None:
    """The loss that ``network`` carries, if it does."""
    return network.__dict__.get(_OWN, [None])[0]


def loss_of(network: nn.Module, loss: Loss) -> Loss:
    """The loss that ``network`` carries, else ``loss``."""
    own = own_loss(network)
    return loss if own is None else own


def one_number(loss: object) -> Tensor:
    """What a loss returned, as a scalar. Raises DiagnoseError where it is none that could be trained on."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        what = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise DiagnoseError(f"loss(outputs) is not one real number but {what}: sum or average it")
    if not loss.requires_grad:
        raise DiagnoseError("the loss depends on no parameter and no input: everything is detached")
    return loss.reshape(())
