"""Runs of one network, recorded or not, with values of its own or with others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.arithmetic.anew import Anew
from driftlab.arithmetic.draws import Draws
from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.passes import Recorded, computing, in_arithmetic, own_inputs
from driftlab.arithmetic.shadow import plain
from driftlab.arithmetic.shadow_tensor import Native
from driftlab.network.calling import evaluation_mode, named_leaves, seed_random_layers, tensors_in
from driftlab.tracing.flow import Flow, Recorder
from driftlab.tracing.gradients import Steps
from driftlab.tracing.rewriting import Change, Rewriter
from driftlab.tracing.scopes import Scopes

FORWARD = ("forward", "eval")


def flow_of(
    network: nn.Module,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int,
    nudge: torch.Generator | None = None,
    **watched: Any,
) -> Flow:
    """The values of its forward pass, or of its backward pass.

    Args:
        arithmetic: as of ``parting``.
        pass_: "forward" or "eval"; any other is the backward pass.
        nudge, watched: as of ``shadow_arithmetic`` and ``Recorder``.
    """
    twin = ready(network, whole, arithmetic, pass_, seed)
    return _flow_in(twin, whole, arithmetic, pass_, seed, nudge, **watched)


class Again:
    """One network's forward pass again and again, which finds it each time as it was at first.

    Args:
        pass_: "forward" or "eval".
    """

    def __init__(self, network: nn.Module, whole: Recorded, arithmetic: str, pass_: str, seed: int):
        self._twin = Anew(ready(network, whole, arithmetic, pass_, seed))
        self._about = whole, arithmetic, pass_, seed
        self._draws = Draws()

    def flow(self, **watched: Any) -> Flow:
        """``watched`` as of ``Recorder``."""
        return _flow_in(self._twin.begun(), *self._about, **watched)

    def results(
        self,
        changes: Mapping[tuple[int, int], Change],
        given: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        """As ``results_of``, with values changed or given instead, as of ``Rewriter``."""
        return results_of(self._twin.begun(), *self._about, self._draws, Rewriter(changes, given))


def ready(network: nn.Module, whole: Recorded, arithmetic: str, pass_: str, seed: int) -> nn.Module:
    """A copy; what is evaluated has been trained on the batch."""
    twin = in_arithmetic(network, arithmetic)
    if pass_ == "eval":
        results_of(twin, whole, arithmetic, "forward", seed)
    return twin


def _flow_in(
    twin: nn.Module,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int,
    nudge: torch.Generator | None = None,
    **watched: Any,
) -> Flow:
    """The same of a network that is ready, which is left as the run leaves it."""
    leaves: list[Tensor] = []
    with computing(arithmetic, nudge, Native.TABLES if nudge else Native.NOTHING):
        given = own_inputs(whole, arithmetic, leaves)
        seed_random_layers(seed)
        if pass_ in FORWARD:
            return _forward(twin, whole, given, arithmetic, pass_ == "eval", watched)
        inputs = {str(number): leaf for number, leaf in enumerate(leaves)}
        return _backward(twin, whole, given, arithmetic, dict(twin.named_parameters()) | inputs)


def results_of(
    twin: nn.Module,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int,
    draws: Draws | None = None,
    within: AbstractContextManager | None = None,
) -> dict[str, Tensor]:
    """Of the forward pass alone, float64: the outputs by their names, and the loss in training.

    Args:
        twin: made by ``in_arithmetic``.
        draws: as of ``computing``.
        within: where it runs.
    """
    with computing(arithmetic, draws=draws):
        given = own_inputs(whole, arithmetic)
        seed_random_layers(seed)
        with within or nullcontext():
            ends = _ends(twin, whole, given, arithmetic, pass_ == "eval")
    return {name: plain(tensor).cpu() for name, tensor in ends.items()}


def _ends(
    twin: nn.Module, whole: Recorded, given: tuple, arithmetic: str, evaluate: bool
) -> dict[str, Tensor]:
    """The outputs by their names, and the loss, which evaluation has not."""
    with evaluation_mode(twin) if evaluate else nullcontext():
        outputs = whole.called(twin, given, arithmetic)
        if evaluate or whole.loss is None:
            return named_leaves(outputs)
        return named_leaves(outputs) | {LOSS: whole.measured(twin, outputs, arithmetic)}


def _forward(
    twin: nn.Module,
    whole: Recorded,
    given: tuple,
    arithmetic: str,
    evaluate: bool,
    watched: Mapping[str, Any],
) -> Flow:
    """What is made up to the loss; up to the outputs in eval mode, as evaluation has no loss."""
    recorder = Recorder(Scopes(twin), **watched)
    recorder.given(list(twin.parameters()), tensors_in(given))
    with recorder:
        ends = _ends(twin, whole, given, arithmetic, evaluate)
        recorder.flow.results = {name: recorder.number(tensor) for name, tensor in ends.items()}
    recorder.flow.ends = {name: plain(tensor).cpu() for name, tensor in ends.items()}
    return recorder.flow


def _backward(
    twin: nn.Module, whole: Recorded, given: tuple, arithmetic: str, leaves: Mapping[str, Tensor]
) -> Flow:
    steps = Steps()
    Scopes(twin, steps.claim)
    outputs = whole.called(twin, given, arithmetic)
    loss = whole.measured(twin, outputs, arithmetic)
    steps.claim(loss, "")
    steps.watch()
    loss.backward()
    return steps.flow(leaves)
