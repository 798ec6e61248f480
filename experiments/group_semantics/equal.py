"""Grouped convs against plain convs on the slices of their input: how far apart are they, and may they be?"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from driftlab.arithmetic.integers import EXACT_PASSES, IntegerPair
from driftlab.arithmetic.passes import Passes, Recorded, run
from driftlab.arithmetic.sizes import with_gradients
from driftlab.network.calling import copied
from driftlab.precision import PRECISIONS
from driftlab.probes.rounding_bound import Bound, rounding_bounds
from driftlab.rounding import UNIT_ROUND_OFF
from models.rewrites.grouped_conv import separate_groups

CASES = {"smoke": 12, "small": 40, "full": 400}  # other convs a seed; every seed draws its own
IMAGE = (13, 11)  # pixels, at least the widest kernel, dilated: 9
SIGNIFICAND = {"float32": 23, "float64": 52}  # bits behind the leading one


@dataclass(frozen=True)
class Pair:
    """A grouped conv, the same as convs side by side, and the inputs and output gradients of both."""

    grouped: nn.Conv2d
    separate: nn.Module
    call: Recorded


def side_by_side(grouped: nn.Conv2d, x: Tensor) -> Pair:
    """The pair on inputs x [N, C, H, W], with output gradients of normal distribution."""
    grouped = grouped.to(x.device)
    call = with_gradients(grouped, Recorded((x.requires_grad_(),)), lambda y: torch.randn(y.shape))
    return Pair(grouped, separate_groups(grouped), call)


def compare(pair: Pair, dtype: str) -> list[dict]:
    """The passes in one dtype, a dict each.

    "absolute", "relative" (to the largest entry) and "ulps" (of the entry where it occurs) are of the largest
    absolute difference; "u" is the largest in units of u (|W| * |x|), "bound" what 2 gamma_K allows
    it, "share" their largest quotient, entry by entry; "equal" and "entries" count bits that agree.
    """
    own, other = run(pair.grouped, pair.call, dtype, evaluate=False), _separate(pair, dtype)
    bounds = {b.pass_: b for b in rounding_bounds(pair.grouped, pair.call, own, other)}
    return [
        {"pass": p, "dtype": dtype}
        | _apart(_entries(own, p), _entries(other, p), dtype)
        | _in_bound(bounds[p], dtype)
        for p in EXACT_PASSES
    ]


def errors(pair: Pair) -> dict[str, dict[str, float]]:
    """pass -> the largest absolute error of either float32 result, held against float64."""
    truth = run(pair.grouped, pair.call, "float64", evaluate=False)
    own, other = run(pair.grouped, pair.call, "float32", evaluate=False), _separate(pair, "float32")

    def error(passes: Passes, pass_: str) -> float:
        return float((_entries(passes, pass_) - _entries(truth, pass_)).abs().max())

    return {p: {"grouped": error(own, p), "separate": error(other, p)} for p in EXACT_PASSES}


def integers_agree(pair: Pair, seed: int) -> dict[str, bool] | None:
    """pass -> whether small integers give the same bits; None where the grouped conv is not exact itself."""
    probe = IntegerPair(pair.grouped, pair.separate, pair.separate.fold, ("", ""), seed)
    probe.set_weights(probe.small)
    found = probe.exactness(probe.inputs(pair.call, probe.small))
    return None if found is None else {p: p not in found for p in EXACT_PASSES}


def kernels(pair: Pair, dtype: str) -> dict[str, list[str]]:
    """Which of its convolution kernels torch chooses for the forward pass of either."""
    chosen = {}
    for name, module in (("grouped", pair.grouped), ("separate", pair.separate)):
        module, kept = copied(module).to(PRECISIONS[dtype].dtype), []
        for conv in (m for m in module.modules() if isinstance(m, nn.Conv2d)):
            conv.register_forward_pre_hook(
                lambda conv, inputs, kept=kept: kept.append(_kernel(conv, *inputs))
            )
        module(pair.call.args[0].detach().to(PRECISIONS[dtype].dtype))
        chosen[name] = sorted(set(kept))
    return chosen


def _kernel(conv: nn.Conv2d, x: Tensor) -> str:
    # torch's profiler would show the same, and writes a dozen lines to stderr wherever there is no GPU
    sizes = conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups
    return torch._C._select_conv_backend(x, conv.weight, conv.bias, *sizes).name


def _separate(pair: Pair, dtype: str) -> Passes:
    """What the convs side by side give, by the names of the grouped conv."""
    found = run(pair.separate, pair.call, dtype, evaluate=False).tensors
    return Passes(found | {"weight gradient": pair.separate.fold(found["weight gradient"])})


def _entries(passes: Passes, pass_: str) -> Tensor:
    return torch.cat([t.flatten() for _, t in sorted(passes.tensors[pass_].items())])


def _apart(own: Tensor, other: Tensor, dtype: str) -> dict[str, float]:
    apart, size = (own - other).abs(), own.abs()
    worst = int(apart.argmax())
    ulp = 2.0 ** (math.frexp(float(size[worst]))[1] - 1 - SIGNIFICAND[dtype])
    return {
        "absolute": float(apart[worst]),
        "relative": float(apart[worst] / size.max()),
        "ulps": float(apart[worst]) / ulp,
        "equal": int((apart == 0).sum()),
        "entries": apart.numel(),
    }


def _in_bound(bound: Bound, dtype: str) -> dict[str, float]:
    """``rounding_bounds`` measures against float32; gamma_K is proportional to u but for a factor 1 + K u."""
    u = UNIT_ROUND_OFF[dtype]
    return {
        "terms": bound.terms,
        "u": 2.0**-bound.bits / u if bound.share else 0.0,
        "bound": 2 * bound.terms / (1 - bound.terms * u),
        "share": bound.share * UNIT_ROUND_OFF["float32"] / u,
    }


def sweep(settings: DictConfig, seed: int) -> list[dict]:
    """Random settings of nn.Conv2d, each with what the float32 passes and the integers of the pair say."""
    drawn = random.Random(seed)
    cases = CASES[settings.scale.name] if settings.sweep.cases is None else settings.sweep.cases
    return [_measured(draw(drawn, settings.sweep), settings.device, seed) for _ in range(cases)]


def draw(drawn: random.Random, sweep: DictConfig) -> dict:
    """Settings of one conv. "depthwise" has a group for every input channel."""
    kind = drawn.choice(list(sweep.groups))
    each = drawn.choice(list(sweep.channels))
    groups = each if kind == "depthwise" else kind
    inputs = each if kind == "depthwise" else each * groups
    return {
        "in_channels": inputs,
        "out_channels": groups * drawn.choice([1, 2, 5]),
        "groups": groups,
        "kernel_size": drawn.choice([1, 3, 5, (5, 3)]),
        "stride": drawn.choice([1, 2]),
        "dilation": drawn.choice([1, 2]),
        "padding": drawn.choice([0, 1, 2]),
        "padding_mode": drawn.choice(["zeros", "reflect", "replicate", "circular"]),
        "bias": drawn.choice([False, True]),
    }


def _measured(case: dict, device: str, seed: int) -> dict:
    x = torch.randn(2, case["in_channels"], *IMAGE).to(device)
    pair = side_by_side(nn.Conv2d(**case), x)
    exact = integers_agree(pair, seed)
    passes = [
        {key: found[key] for key in ("pass", "absolute", "u", "bound", "share", "terms", "equal", "entries")}
        for found in compare(pair, "float32")
    ]
    return {
        "groups": "depthwise" if case["groups"] == case["in_channels"] else case["groups"],
        "case": ", ".join(f"{name}={value}" for name, value in case.items()),
        "integers": exact,
        "passes": passes,
    }
