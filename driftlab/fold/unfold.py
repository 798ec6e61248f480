"""The way back: the reference's values put into the candidate's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from driftlab.fold.layout import AnyFold, FoldError, flat, moves_only, numbered


class Unfold:
    """The inverse of a fold that moves entries and computes nothing.

    Entries of the candidate that the fold takes nothing from keep the values they have.

    Raises:
        FoldError: the fold computes (adds, scales), so that there is no way back.
    """

    def __init__(self, fold: AnyFold, candidate: Mapping[str, Tensor]):
        serials = numbered(candidate)
        folded = fold(serials)
        numbers = flat(folded.values())
        if not moves_only(fold, serials, numbers):
            raise FoldError("the fold computes with its tensors, so it cannot be reversed")
        self.names = list(folded)
        self.order = numbers.long() - 1

    def __call__(self, reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The candidate's tensors, in their own shapes and dtypes, with the reference's values."""
        vector = flat(candidate.values())
        vector[self.order.to(vector.device)] = flat(reference[name] for name in self.names)
        parts = vector.split([t.numel() for t in candidate.values()])
        return {
            name: part.view(t.shape).to(t.dtype)
            for (name, t), part in zip(candidate.items(), parts, strict=True)
        }


def floating_tensors(module: nn.Module, prefix: str = "", buffers: bool = True) -> dict[str, Tensor]:
    """The parameters, and buffers, that hold floating numbers, by name behind ``prefix``."""
    tensors = [*module.named_parameters(prefix=prefix)]
    if buffers:
        tensors += [(n, b) for n, b in module.named_buffers(prefix=prefix)]
    return {name: t.detach() for name, t in tensors if t.is_floating_point()}


@torch.no_grad()
def put_weights(
    reference: nn.Module,
    candidate: nn.Module,
    fold: AnyFold,
    values: Callable[[str, Tensor], Tensor],
    prefixes: tuple[str, str] = ("", ""),
) -> None:
    """Give both modules the weights ``values(reference's name, its tensor)``, in place.

    Raises:
        FoldError: the fold has no way back, or some parameter of either module is not covered by it.
    """
    mine = floating_tensors(reference, prefixes[0], buffers=False)
    theirs = floating_tensors(candidate, prefixes[1], buffers=False)
    unfold = Unfold(fold, theirs)
    once = len(unfold.order.unique()) == len(unfold.order) == sum(t.numel() for t in theirs.values())
    if set(mine) != set(unfold.names) or not once:
        raise FoldError("not every weight of the two modules has its place in the other")
    for name, tensor in mine.items():
        tensor.copy_(values(name, tensor))
    for name, tensor in unfold(mine, theirs).items():
        theirs[name].copy_(tensor)


@torch.no_grad()
def put_weights_or_fold(
    reference: nn.Module,
    candidate: nn.Module,
    fold: AnyFold,
    values: Callable[[str, Tensor], Tensor],
) -> None:
    """As ``put_weights``, or forwards where the fold has no way back.

    The candidate then gets ``values(its own name, its tensor)``, and the reference what the fold makes of
    them. What has no place in the other stays as it is.
    """
    try:
        put_weights(reference, candidate, fold, values)
    except FoldError:
        for name, tensor in floating_tensors(candidate, buffers=False).items():
            tensor.copy_(values(name, tensor))
        given = fold(floating_tensors(candidate))
        for name, tensor in floating_tensors(reference, buffers=False).items():
            if name in given:
                tensor.copy_(given[name])
