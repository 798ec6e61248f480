"""What chunks of a fixed size cost, and whether a row's place in its chunk matters."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from driftlab.batch_invariance import batch_invariant
from experiments.questions.batch.arithmetic import computing, in_arithmetic
from experiments.questions.batch.plan import Plan
from models.policy_net import PolicyNet


def costs(plan: Plan, network: PolicyNet, rows: Tensor) -> list[dict]:
    """What the plain network and chunks take, by batch size, and whether the first row's answer stays.

    Returns:
        For each "batch" and "chunk" (None is the plain network) "milliseconds", the median of some
        repetitions, and "same": whether the first row's logits have the bits that they have in a batch of 1.
    """
    asked = {None: network} | {c: batch_invariant(network, c) for c in plan.cost_chunks}
    found = []
    with computing("float32"):
        for chunk, module in asked.items():
            alone = module(rows[:1])
            for n in plan.cost_batches:
                # what is set up at the first call of a shape is not what is timed
                same = torch.equal(module(rows[:n])[:1], alone)
                took = _median_time(lambda m=module, n=n: m(rows[:n]), plan)
                found.append({"batch": n, "chunk": chunk, "milliseconds": took, "same": same})
    return found


def _median_time(call: Callable[[], object], plan: Plan) -> float:
    times = []
    for _ in range(plan.repeats):
        _wait(plan.device)
        began = time.perf_counter()
        call()
        _wait(plan.device)
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def places(plan: Plan, network: PolicyNet, row: Tensor) -> list[dict]:
    """The same row in every place of a chunk: does its answer depend on the place?

    Returns:
        For each "chunk" and "arithmetic" how many "answers" its places give, and the largest absolute
        "difference" from the first place.
    """
    found = []
    for arithmetic in ("float32", "float64"):
        twin = in_arithmetic(network, arithmetic)
        for chunk in plan.cost_chunks:
            with computing(arithmetic):
                copies = row.to(next(twin.parameters()).dtype).expand(chunk, *row.shape[1:]).contiguous()
                logits = twin(copies)
            found.append(
                {
                    "chunk": chunk,
                    "arithmetic": arithmetic,
                    "answers": len(torch.unique(logits, dim=0)),
                    "difference": float((logits - logits[0]).abs().max()),
                }
            )
    return found
