"""How far the first row's answer moves with the batch size, by size and depth, and which layer is first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from driftlab.batch_invariance import batch_invariant
from experiments.batch_size.arithmetic import arithmetics, computing, in_arithmetic
from experiments.batch_size.network import AllDepths, boards
from experiments.batch_size.plan import Plan
from models.policy_net import PolicyHead

INPUTS = ("zeros", "random")


class FirstRows:
    """The first row of what each layer gives, by its name in the deepest network, the first call counts."""

    def __init__(self, network: nn.Module):
        self.rows: dict[str, Tensor] = {}
        leaves = [(n, m) for n, m in network.named_modules() if not list(m.children())]
        self._hooks = [m.register_forward_hook(self._keep(name)) for name, m in leaves]

    def _keep(self, name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
            self.rows.setdefault(name, output[0].clone())

        return hook

    def taken(self) -> dict[str, Tensor]:
        """What was seen since the last time, in the order of execution."""
        rows, self.rows = self.rows, {}
        return rows

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def sweeps(plan: Plan, networks: dict[str, AllDepths], seed: int) -> list[dict]:
    """One sweep over the batch sizes for each norm, arithmetic and kind of inputs.

    Args:
        networks: by the name of their norm.
    """
    found = []
    for norm, network in networks.items():
        for arithmetic in arithmetics(plan.device):
            everything = norm == "batch" and arithmetic == "float32"
            twin = in_arithmetic(network, arithmetic)
            for inputs in INPUTS:
                rows = boards(plan, inputs, seed).to(next(twin.parameters()).dtype)
                with computing(arithmetic):
                    swept = sweep(plan, twin, rows, plan.sizes if everything else plan.few)
                found.append({"norm": norm, "arithmetic": arithmetic, "inputs": inputs, **swept})
    return found


def sweep(plan: Plan, network: AllDepths, rows: Tensor, sizes: Sequence[int]) -> dict:
    """The first row in batches of ``sizes`` against a batch of 1.

    Returns:
        "sizes": as given. "differences": for each, the largest absolute difference of the deepest network's
        logits. "patterns": for each, which of the bit patterns of the logits it has; 0 is that of a batch of
        1. "first": for each, the first layer whose output differs, or None. "depths": for each depth
        "difference", the largest over the sizes, and "common", that over the plan's few sizes, which every
        sweep has; "logit", the largest logit in absolute value; "signal", the largest of logit less bias;
        "size", the root mean square of what the last block gives; "relative", its largest relative difference
        over the few sizes (2-norms).
    """
    asked = batch_invariant(network, plan.chunk) if plan.invariant else network
    seen = FirstRows(network.deepest())
    alone, layers = _logits(asked, rows[:1]), seen.taken()
    patterns, apart, inside = [alone[-1]], [], []
    found = {"sizes": list(sizes), "differences": [], "patterns": [], "first": []}
    for size in sizes:
        logits, now = _logits(asked, rows[:size]), seen.taken()
        apart.append([float((a - b).abs().max()) for a, b in zip(logits, alone, strict=True)])
        inside.append([relative(_block(now, d), _block(layers, d)) or 0.0 for d in range(len(alone))])
        found["patterns"].append(pattern(logits[-1], patterns))
        found["first"].append(next((n for n in layers if not torch.equal(now[n], layers[n])), None))
    seen.remove()
    found["differences"] = [by_depth[-1] for by_depth in apart]
    common = [i for i, size in enumerate(sizes) if size in plan.few]
    found["depths"] = [
        {
            "difference": max(by_depth[depth] for by_depth in apart),
            "common": max(apart[i][depth] for i in common),
            "relative": max(inside[i][depth] for i in common),
            **_sizes(alone[depth], head, _block(layers, depth)),
        }
        for depth, head in enumerate(network.policy_heads)
    ]
    return found


def _sizes(logits: Tensor, head: PolicyHead, block: Tensor) -> dict:
    return {
        "logit": float(logits.abs().max()),
        "signal": float((logits - head.linear.bias).abs().max()),
        "size": float(block.square().mean().sqrt()),
    }


def relative(mine: Tensor, other: Tensor) -> float | None:
    """‖mine - other‖₂ / ‖other‖₂; 0 where they are equal, None where only ``other`` is zero."""
    apart, size = float((mine - other).norm()), float(other.norm())
    return 0.0 if apart == 0 else apart / size if size else None


def _logits(network: nn.Module, rows: Tensor) -> list[Tensor]:
    return [logits[0] for logits in network(rows)]


def _block(layers: dict[str, Tensor], depth: int) -> Tensor:
    return layers[f"res_blocks.{depth - 1}.act2" if depth else "conv_block.act"]


def pattern(result: Tensor, known: list[Tensor]) -> int:
    """The number of the bit pattern; a new one is added to ``known``."""
    for number, other in enumerate(known):
        if torch.equal(result, other):
            return number
    known.append(result)
    return len(known) - 1
