"""One seed of ``batch_size``: the sweeps, the layers one by one, the suite's verdicts, the cost of chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from omegaconf import DictConfig
from torch import Tensor

from driftlab.batch_invariance import batch_invariant
from experiments.batch_size.arithmetic import computing, in_arithmetic
from experiments.batch_size.layers import kernels, layer_by_layer
from experiments.batch_size.network import boards, prepared
from experiments.batch_size.plan import Plan, read
from experiments.batch_size.suite import verdicts
from experiments.batch_size.sweep import INPUTS, sweeps
from models.policy_net import NORMS, PolicyNet
from suite.running.asking import Measured


def measure(settings: DictConfig, seed: int) -> Measured:
    """Raises ConfigurationError where a setting cannot be used."""
    plan = read(settings)
    networks = {norm: prepared(plan, norm, seed) for norm in NORMS}
    network, rows = networks["batch"].deepest(), boards(plan, "random", seed)
    record, said = verdicts(plan, network, rows, seed)
    values = {
        "sweeps": sweeps(plan, networks, seed),
        "verdicts": said,
        "costs": costs(plan, network, rows),
        "places": places(plan, network, rows[:1]),
    }
    # in chunks no layer ever sees another size, so that there is nothing to look at one by one
    return Measured(record, values | ({} if plan.invariant else _why(plan, network, seed)))


def _why(plan: Plan, network: PolicyNet, seed: int) -> dict:
    given = {inputs: boards(plan, inputs, seed) for inputs in INPUTS}
    sizes = {"float32": plan.sizes, "float64": plan.few}
    return {
        "layers": {inputs: layer_by_layer(network, rows[: plan.at]) for inputs, rows in given.items()},
        "kernels": kernels(network, given["random"][: plan.sizes[-1]], sizes),
    }


def about(settings: DictConfig) -> str:
    plan = read(settings)
    mode = f", in chunks of {plan.chunk}" if plan.invariant else ""
    depths = f"0 to {plan.blocks}" if plan.blocks else "no"
    return f"the first row's logits in batches of 1 to {plan.sizes[-1]}, {depths} residual blocks{mode}"


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
