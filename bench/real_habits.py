"""What today's habits say of a case: outputs, gradients and weights compared, losses, float64 reruns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.case import Case
from bench.habits import LOSS_TOLERANCE, PRINTED_DECIMALS, Rule, printed_alike, within
from driftlab.diagnosis import sgd
from driftlab.lockstep.arm import Arm, grow
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import calling, copied, named_leaves, own_batch
from driftlab.network.pair import Pair, the_pair

STEPS = 20  # as many updates as the diagnosis looks at


@dataclass
class Seen:
    """What a case's reference and candidate show; None where it could not be had.

    Attributes:
        outputs, gradients, weights: whether torch.testing.assert_close lets them pass in float32: the first
            batch's first output and folded gradients, and the folded weights after two updates.
        losses: reference's and candidate's, step by step; ``wide`` the same in float64.
    """

    outputs: bool | None = None
    gradients: bool | None = None
    weights: bool | None = None
    losses: list[tuple[float, float]] | None = None
    wide: list[tuple[float, float]] | None = None


def _curves(seen: Seen) -> bool | None:
    if seen.losses is None:
        return None
    return all(within(b / a - 1 if a else b - a, LOSS_TOLERANCE) for a, b in seen.losses)


HABITS = (
    Rule("outputs", "assert_close of the first output", lambda seen: seen.outputs),
    Rule("gradients", "assert_close of the first gradients", lambda seen: seen.gradients),
    Rule("two_updates", "assert_close of the weights after two updates", lambda seen: seen.weights),
    Rule("loss_curves", f"losses within {LOSS_TOLERANCE:.0%} over {STEPS} updates", _curves),
    Rule(
        "float64",
        f"rerun in float64: last loss equal to {PRINTED_DECIMALS} decimals",
        lambda seen: None if seen.wide is None else printed_alike(seen.wide[-1]),
    ),
)


def seen_of(case: Case) -> Seen:
    """Trains both in lockstep, in float32 and then in float64; what raises leaves its part open."""
    seen = Seen()
    for dtype in ("float32", "float64"):
        try:
            _watch(case, dtype, seen)
        except Exception:  # theirs: a habit that cannot be followed says nothing
            continue
    return seen


def _watch(case: Case, dtype: str, seen: Seen) -> None:
    reference, candidate, fold = the_pair(case.task.network(), case.rewrite, None)
    batches = case.task.batches()
    make = case.options.get("optimizer", sgd)
    own = case.options.get("candidate_optimizer") or (lambda module: make(module.parameters()))
    pair = Pair(reference, candidate, fold, case.task.loss, lambda m: make(m.parameters()), own)
    pair.call = calling(reference, batches[0][0])
    if dtype == "float32":
        seen.outputs = _outputs_agree(pair, batches[0][0])
    arms = grow(
        reference,
        candidate,
        optimizer=pair.optimizer,
        candidate_optimizer=own,
        horizons={dtype: STEPS},
        controls=(),
        fold=pair.comparable,
    )
    lockstep = Lockstep(arms, case.task.loss, call=pair.call)
    for step in range(STEPS + 1):
        lockstep.forward_backward(step, *batches[step % len(batches)])
        if step == 0 and dtype == "float32":
            seen.gradients = _agree(_gradients(arms[0]), arms[1].fold(_gradients(arms[1])))
        lockstep.update(step)
        if step == 1 and dtype == "float32":
            seen.weights = _agree(_weights(arms[0]), arms[1].fold(_weights(arms[1])))
    lockstep.flush()
    losses = [tuple(row[f"loss/{arm.name}"] for arm in arms) for row in lockstep.rows.values()]
    setattr(seen, "losses" if dtype == "float32" else "wide", losses)


def _outputs_agree(pair: Pair, inputs: object) -> bool:
    found = []
    for network in (pair.reference, pair.candidate):
        torch.manual_seed(0)
        with torch.no_grad():
            leaves = named_leaves(pair.call(copied(network).train(), own_batch(inputs, torch.float32)))
        found.append({"output": next(iter(leaves.values()))})
    return _agree(*found)


def _gradients(arm: Arm) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in arm.trained.items()}


def _weights(arm: Arm) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in arm.trained.items()}


def _agree(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Of those that both have: who compares by hand compares what he can put side by side."""
    try:
        for name in mine.keys() & theirs.keys():
            torch.testing.assert_close(theirs[name], mine[name])
    except AssertionError:
        return False
    return bool(mine.keys() & theirs.keys())
