"""The two networks that are compared: copies of what was handed over, and the fold between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from driftlab.copying import copied
from driftlab.fold import Fold, FoldError, find_fold

Rewrite = Callable[[nn.Module], nn.Module]


class DiagnoseError(ValueError):
    """What was asked cannot be diagnosed; the message is one line: what, where, what to write instead."""


def the_pair(
    reference: nn.Module, candidate: nn.Module | Rewrite, fold: Callable | None
) -> tuple[nn.Module, nn.Module, Fold]:
    """Copies of both in float32, and the fold between them. Raises DiagnoseError where there are not two."""
    if not isinstance(reference, nn.Module):
        raise DiagnoseError(f"reference is a {type(reference).__name__}: give a torch.nn.Module")
    reference = copied(reference)
    candidate, rewrite = _candidate(reference, candidate)
    kept = next((p.dtype for p in reference.parameters() if p.is_floating_point()), torch.float32)
    if kept != torch.float32:  # both dtypes are looked at anyway, from the same weights
        reference, candidate = reference.float(), candidate.float()
    for network in (reference, candidate):
        _in_its_own_mode(network)
    if fold is not None:
        candidate.fold = fold
    try:
        return reference, candidate, find_fold(reference, candidate, rewrite)
    except FoldError as error:
        raise DiagnoseError(str(error)) from None


def _in_its_own_mode(network: nn.Module) -> None:
    """A network with a ``train`` of its own (norms that stay in eval mode) is put into its mode by that."""
    if any(type(m).train is not nn.Module.train for m in network.modules()):
        network.train(network.training)


def _candidate(reference: nn.Module, candidate: nn.Module | Rewrite) -> tuple[nn.Module, Rewrite | None]:
    if isinstance(candidate, nn.Module):
        return copied(candidate), None
    if not callable(candidate):
        raise DiagnoseError(
            f"candidate is a {type(candidate).__name__}: give a torch.nn.Module, or a function model -> model"
        )
    try:
        made = candidate(copied(reference))
    except Exception as error:
        raise DiagnoseError(f"candidate(model) raised {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise DiagnoseError(
            f"candidate(model) returned a {type(made).__name__}: it must return a torch.nn.Module"
        )
    return made, candidate


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
