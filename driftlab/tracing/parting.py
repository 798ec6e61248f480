"""Where two networks part whose modules cannot be paired: by the values that pass through them.

A candidate built in another way, under other names, still has to come by what the reference computes. So all
that either makes on its way is recorded (``flow``). From the loss one goes up the flow of the reference,
through values that the candidate never has, until each is made of values that it has: there they part. What a
rewrite computes in another way and rightly leads to a value that both have, and is not come by. The same from
the candidate's side gives the place under its own name; the flow of the gradients, from those that are wrong,
gives a fault of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.arithmetic.anew import Anew
from driftlab.arithmetic.constants import WITHIN, nudged
from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.passes import Recorded, computing, in_arithmetic, own_inputs
from driftlab.arithmetic.shadow import plain
from driftlab.arithmetic.shadow_tensor import Native
from driftlab.fold import Fold
from driftlab.network.calling import evaluation_mode, named_leaves, seed_random_layers, tensors_in
from driftlab.rounding import UNIT_ROUND_OFF
from driftlab.tracing.cone import Cone
from driftlab.tracing.flow import Flow, Recorder, Rewriter, Scopes, Steps, Value
from driftlab.tracing.prints import AGREE
from driftlab.tracing.silencing import Silencing

Right = Callable[[str], bool]
FORWARD = ("forward", "eval")
# By so many of the reference's own roundings may a right value's sums differ. bfloat16 makes thousands, fewer
# where few numbers went through it: of three such faults three were placed at 5 and 8, two at 20, one at 90.
OWN_ROUNDINGS = 8


@dataclass(frozen=True)
class Traced:
    """One network of the two.

    Attributes:
        ends: its outputs that are wrong, its parameters and inputs whose gradients are, by name.
        right: whether a module, by its name, is known to be right by itself.
        constants: its tensors that the other has no equal of.
    """

    network: nn.Module
    ends: Sequence[str]
    right: Right
    constants: list[str] = field(default_factory=list)


def parting(
    reference: Traced,
    candidate: Traced,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int = 0,
    fold: Fold | None = None,
) -> tuple[str, str | None] | None:
    """The innermost module of the reference in which the two part, and that of the candidate, if it is seen.

    "" is the network's own code; None where nothing is seen to part.

    Args:
        arithmetic: in which rounding is gone; "float32" to see where bits are lost.
        pass_: "forward" or "eval"; any other is the backward pass.
        fold: of the two; where they part in several modules, these are silenced in both to see which it is.
    """
    both = reference, candidate
    flows = [flow_of(traced.network, whole, arithmetic, pass_, seed) for traced in both]
    margins = [_margins(t, f, whole, arithmetic, pass_, seed) for t, f in zip(both, flows, strict=True)]
    for narrower in (1, 4, 16):  # what is known to be wrong may not be taken for the same
        mine, theirs = (
            Cone(own, other, traced.ends, traced.right, [max(AGREE, w / narrower) for w in within])
            for own, other, traced, within in zip(flows, reversed(flows), both, margins, strict=True)
        )
        if mine.first:
            backward = pass_ not in FORWARD
            if fold is not None and not backward and len(mine.begun()) > 1:
                record = partial(flow_of, whole=whole, arithmetic=arithmetic, pass_=pass_, seed=seed)
                silencing = Silencing((reference.network, candidate.network), flows, fold, record)
                mine.keep(silencing.survivors(mine))
            return mine.scope(cut=backward and theirs.is_cut(mine)), theirs.scope_beside(mine)
    return None


def _margins(
    traced: Traced, flow: Flow, whole: Recorded, arithmetic: str, pass_: str, seed: int
) -> list[float]:
    """How far from each value that of the other may lie, for constants that one of them stores in float32."""
    if arithmetic == "float32":
        return _roundings(flow, flow_of(traced.network, whole, "shadow", pass_, seed))
    if arithmetic != "shadow":
        return [AGREE] * len(flow.values)
    twin, generator = nudged(traced.network, traced.constants)
    moved = flow_of(twin, whole, arithmetic, pass_, seed, generator).values
    if len(moved) != len(flow.values):
        return [AGREE] * len(flow.values)
    pairs = ((v.prints, m.prints) for v, m in zip(flow.values, moved, strict=True))
    return [max(AGREE, WITHIN * a.apart(b)) if a and b else AGREE for a, b in pairs]


def _roundings(flow: Flow, exact: Flow) -> list[float]:
    """Some times what float32's rounding makes of each value's prints; as little as makes any at all.

    The loss may be computed in other operations without rounding, and counts as the last value before it.
    """
    found = [AGREE]
    for number, value in enumerate(flow.values):
        other = exact.values[number].prints if number < len(exact.values) else None
        if value.prints and other and value.prints.whole[0] == other.whole[0]:
            least = UNIT_ROUND_OFF["float32"] / 2 / math.sqrt(other.whole[0])
            found.append(OWN_ROUNDINGS * max(value.prints.apart(other), least))
        else:
            found.append(found[-1])
    return found[1:]


def flow_of(
    network: nn.Module,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int,
    nudge: torch.Generator | None = None,
    **watched: Any,
) -> Flow:
    """Arguments as of ``parting``; ``nudge`` and the last as of ``shadow_arithmetic`` and ``Recorder``."""
    twin = _ready(network, whole, arithmetic, pass_, seed)
    return _flow_in(twin, whole, arithmetic, pass_, seed, nudge, **watched)


class Again:
    """One network's forward pass again and again, which finds it each time as it was at first.

    Args:
        pass_: "forward" or "eval".
    """

    def __init__(self, network: nn.Module, whole: Recorded, arithmetic: str, pass_: str, seed: int):
        self._twin = Anew(_ready(network, whole, arithmetic, pass_, seed))
        self._about = whole, arithmetic, pass_, seed

    def flow(self, change: Callable[[int, Value, Tensor], None]) -> Flow:
        return _flow_in(self._twin.begun(), *self._about, change=change)

    def results(self, values: Mapping[tuple[int, int], Tensor]) -> dict[str, Tensor]:
        """As ``results_of``, with ``values`` in the place of its own, as of ``Rewriter``."""
        return results_of(self._twin.begun(), *self._about, within=Rewriter(values))


def _ready(network: nn.Module, whole: Recorded, arithmetic: str, pass_: str, seed: int) -> nn.Module:
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
    within: AbstractContextManager | None = None,
) -> dict[str, Tensor]:
    """Of the forward pass alone, float64: the outputs by their names, and the loss in training.

    Args:
        twin: made by ``in_arithmetic``.
        within: where it runs.
    """
    with computing(arithmetic):
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
    recorder.flow.ends = {name: plain(tensor) for name, tensor in ends.items()}
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
