"""Where the difference comes from: each layer fed exactly the same first row, in batches of many sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlab.rounding import UNIT_ROUND_OFF
from experiments.batch_size.arithmetic import DTYPES, computing, in_arithmetic
from experiments.batch_size.sweep import pattern, relative
from models.policy_net import Add, PolicyNet, ResBlock

KINDS = {
    nn.Conv2d: "convolution",
    nn.BatchNorm2d: "BatchNorm",
    nn.ReLU: "ReLU",
    Add: "residual add",
    nn.Linear: "linear",
    ResBlock: "residual block",
}
Seen = dict[str, tuple[tuple[Tensor, ...], Tensor]]


def seen_layers(network: nn.Module, rows: Tensor) -> Seen:
    """Inputs and output of each layer and residual block, by name, in the order in which they finish."""
    seen: Seen = {}

    def keep(name: str):
        return lambda _module, inputs, output: seen.update({name: (inputs, output)})

    hooks = [m.register_forward_hook(keep(n)) for n, m in network.named_modules() if type(m) in KINDS]
    with computing("float32"):
        network(rows)
    for hook in hooks:
        hook.remove()
    return seen


def layer_by_layer(network: PolicyNet, rows: Tensor) -> list[dict]:
    """For each layer what it carries, adds and amplifies of the difference between a batch and a batch of 1.

    Args:
        network: float32, in eval mode.
        rows: the batch.

    Returns:
        For each "name" and "kind", and of its first row, in relative 2-norms ‖difference‖ / ‖value‖:
        "carried": of its output in the batch from its output alone. "fresh": the same where its first row
        of inputs is bit for bit that of the batch of 1: what the layer adds itself. "gain": relative
        difference of its output over that of its inputs, for the two first rows of inputs both alone and in
        float64, so that no rounding of its own comes in; None where the inputs do not differ.
        "absolute_gain": the same of the norms of the differences. "factor": the median of
        |weight| / sqrt(variance + eps), of a BatchNorm.
    """
    alone, batch = seen_layers(network, rows[:1]), seen_layers(network, rows)
    modules = dict(network.named_modules())
    with computing("float32"):
        return [_layer(name, modules[name], alone[name], batch[name]) for name in alone]


def _layer(name: str, module: nn.Module, alone: tuple, batch: tuple) -> dict:
    (own, output), (others, moved) = alone, batch
    same = [torch.cat([a, b[1:]]) for a, b in zip(own, others, strict=True)]
    return {
        "name": name,
        "kind": KINDS[type(module)],
        "carried": relative(moved[0].double(), output[0].double()),
        "fresh": relative(module(*same)[0].double(), output[0].double()),
        **_gains(module, own, [b[:1] for b in others]),
        "factor": _factor(module),
    }


def _gains(module: nn.Module, own: Sequence[Tensor], moved: Sequence[Tensor]) -> dict:
    wide = copy.deepcopy(module).double()
    before, after = [t.double() for t in own], [t.double() for t in moved]
    into = [torch.cat([t.flatten() for t in inputs]) for inputs in (before, after)]
    out = [wide(*inputs).flatten() for inputs in (before, after)]
    d_in, d_out = (float((b - a).norm()) for a, b in (into, out))
    if d_in == 0 or float(into[0].norm()) == 0 or float(out[0].norm()) == 0:
        return {"gain": None, "absolute_gain": None}
    gain = relative(out[1], out[0]) / relative(into[1], into[0])
    return {"gain": gain, "absolute_gain": d_out / d_in}


def _factor(module: nn.Module) -> float | None:
    if not isinstance(module, nn.BatchNorm2d):
        return None
    return float((module.weight.abs() / (module.running_var + module.eps).sqrt()).median())


def kernels(network: PolicyNet, rows: Tensor, sizes: dict[str, Sequence[int]]) -> list[dict]:
    """For one layer of each kind and shape, how many results its first row has over the batch sizes.

    Args:
        network: float32, in eval mode.
        rows: as many as the largest size.
        sizes: by the name of the arithmetic.

    Returns:
        For each layer and arithmetic "layer", "kind", "arithmetic", "sizes"; "patterns", for each size the
        number of the bit pattern of the first row's result, 0 that of a batch of 1; "difference", the largest
        absolute one from a batch of 1; "ulps", the same in units in the last place of the largest result;
        "bound", the largest share of the a-priori rounding bound (sums of products alone).
    """
    chosen = _one_of_each(network)
    seen = seen_layers(network, rows)
    return [
        {"layer": name, "kind": KINDS[type(chosen[name])], "arithmetic": arithmetic, "sizes": list(tried)}
        | _results(chosen[name], seen[name][0], arithmetic, tried)
        for name in chosen
        for arithmetic, tried in sizes.items()
    ]


def _one_of_each(network: PolicyNet) -> dict[str, nn.Module]:
    """The first layer of each kind and, where it sums products, shape."""
    found: dict[tuple, tuple[str, nn.Module]] = {}
    for name, module in network.named_modules():
        if type(module) in KINDS and not isinstance(module, ResBlock):
            weight = module.weight.shape if isinstance(module, nn.Conv2d | nn.Linear) else ()
            found.setdefault((type(module), *weight), (name, module))
    return dict(found.values())


def _results(module: nn.Module, inputs: tuple[Tensor, ...], arithmetic: str, sizes: Sequence[int]) -> dict:
    twin, given = in_arithmetic(module, arithmetic), [t.to(DTYPES[arithmetic]) for t in inputs]
    with computing(arithmetic):
        alone = twin(*(t[:1] for t in given))[0]
        known, patterns, apart = [alone], [], torch.zeros_like(alone)
        for size in sizes:
            result = twin(*(t[:size] for t in given))[0]
            apart = torch.maximum(apart, (result - alone).abs())
            patterns.append(pattern(result, known))
        bound = _bound(twin, given[0][:1], arithmetic)
    largest = alone.abs().max()
    ulp = float(torch.nextafter(largest, largest.new_tensor(torch.inf)) - largest)
    return {
        "patterns": patterns,
        "difference": float(apart.max()),
        "ulps": float(apart.max()) / ulp,
        "bound": None if bound is None else float(torch.nan_to_num(apart.double() / bound).max()),
    }


def _bound(module: nn.Module, row: Tensor, arithmetic: str) -> Tensor | None:
    """2 gamma_K (|W| * |x|): how far two orders of the same sums may lie apart, for each of a row's outputs.

    As in ``driftlab.probes.rounding_bound``; of the forward pass of one row, in either dtype.
    """
    if not isinstance(module, nn.Conv2d | nn.Linear):
        return None
    weight, x = module.weight.double().abs(), row.double().abs()
    bias = None if module.bias is None else module.bias.double().abs()
    if isinstance(module, nn.Conv2d):
        sums = F.conv2d(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)
    else:
        sums = F.linear(x, weight, bias)
    terms = weight[0].numel() + (bias is not None)
    u = UNIT_ROUND_OFF[arithmetic]
    return 2 * terms * u / (1 - terms * u) * sums[0]
