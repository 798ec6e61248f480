"""Where a candidate takes other inputs, or is trained on another loss; and several batches an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import nn

from driftlab.blame import theirs
from driftlab.network.calling import Call, by_keyword, calling, in_list, unpacked
from driftlab.network.loss import Loss, MeanLoss, carry_loss, own_loss
from driftlab.network.outputs import Outputs
from driftlab.network.pair import Pair
from driftlab.words import DiagnoseError


def takes(candidate: nn.Module, inputs: Callable[[Any], object], call: Call) -> None:
    """Let ``candidate``, and every copy of it, be given ``inputs(what the reference is given)``.

    Args:
        call: how the reference takes its inputs.

    Raises:
        DiagnoseError: ``inputs`` is no function, or the candidate takes no hook.
    """
    if not callable(inputs):
        kind = type(inputs).__name__
        raise DiagnoseError(f"candidate_inputs is a {kind}: give a function of a batch's inputs")
    _refuse_script(candidate, "candidate_inputs")

    def changed(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = theirs(inputs, kwargs if call is by_keyword else args if call is unpacked else args[0])
        own = calling(module, given)
        if own is by_keyword:
            return (), dict(given)
        return (tuple(given) if own is unpacked else (given,)), {}

    candidate.register_forward_pre_hook(changed, with_kwargs=True)


def is_trained_on(candidate: nn.Module, loss: Loss) -> None:
    """Let ``candidate``, and every copy of it, have ``loss`` for its own."""
    _refuse_script(candidate, "candidate_loss")
    carry_loss(candidate, loss)


def _refuse_script(candidate: nn.Module, what: str) -> None:
    if isinstance(candidate, torch.jit.ScriptModule):  # its copies lose what Python has hung on it
        raise DiagnoseError(
            f"{what}: TorchScript takes none: wrap the candidate in a module that does it in Python"
        )


Batch = tuple[object, object]


def gathered(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Batches, repeated as needed, ``count`` of them an update: ``([inputs, ...], [targets, ...])``."""
    updates = lcm(len(batches), count) // count
    groups = [[batches[(u * count + i) % len(batches)] for i in range(count)] for u in range(updates)]
    return [([x for x, _ in group], [y for _, y in group]) for group in groups]


def accumulating(pair: Pair, count: int) -> Pair:
    """The pair on batches that are ``gathered``: each is called in turn, the loss is the mean of theirs."""
    by_hand = pair.outputs.given.items()
    given = {in_list(i, m): t if t is None else in_list(i, t) for i in range(count) for m, t in by_hand}
    if own := own_loss(pair.candidate):
        carry_loss(pair.candidate, MeanLoss(own))
    call = pair.call
    return replace(
        pair,
        loss=MeanLoss(pair.loss),
        outputs=Outputs(given),
        call=lambda module, several: [call(module, inputs) for inputs in several],
    )
