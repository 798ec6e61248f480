"""Which module is wrong by itself: each one fed the reference's exact inputs and output gradients.

A difference that arises in one module travels: downstream through the forward pass, upstream through the
gradients. So the probe runs the reference once, keeps what went into and came back to every module, and
gives both to the candidate's module of the same name. What differs then, arose there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from driftlab.distance import flat, outputs_as_vector, relative_distance
from driftlab.lockstep import cast

PASSES = ("forward", "input gradient", "weight gradient", "buffer", "eval")


@dataclass(frozen=True)
class LocalError:
    """A module's own relative errors in float64, by pass, in the order of ``PASSES``."""

    module: str
    errors: dict[str, float]

    def first_above(self, threshold: float) -> str | None:
        return next((p for p in PASSES if not self.errors.get(p, 0.0) <= threshold), None)

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass
class _Call:
    """What one module saw in the reference's run: its first call only."""

    args: tuple
    kwargs: dict
    gradient: Tensor | None = None


def local_errors(
    reference: nn.Module,
    candidate: nn.Module,
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    loss: Callable[[object, object], Tensor],
    inputs: object,
    targets: object,
) -> list[LocalError]:
    """The own error of every module that both networks have by name, in the reference's order of execution.

    Both are copied and run in float64, in training mode and then in eval mode. Modules that do not return
    one tensor, and those that a candidate does not have, are left out.
    """
    reference, candidate = (copy.deepcopy(m).double().train() for m in (reference, candidate))
    calls = _recorded(reference, loss, cast(inputs, torch.float64), targets)
    theirs = dict(candidate.named_modules())
    mine = dict(reference.named_modules())
    found = []
    for name, call in calls.items():
        if name in theirs and call.gradient is not None:
            try:
                found.append(LocalError(name, _compare(mine[name], theirs[name], call, fold, name)))
            except (TypeError, RuntimeError):  # takes other arguments: its parent is compared instead
                continue
    return found


def first_wrong(errors: list[LocalError], threshold: float) -> tuple[str, str] | None:
    """Module and pass of the first module above ``threshold`` none of whose own submodules is above it."""
    wrong = {e.module: e.first_above(threshold) for e in errors}
    for module, pass_ in wrong.items():
        below = f"{module}." if module else ""
        if pass_ and not any(p and m != module and m.startswith(below) for m, p in wrong.items()):
            return module, pass_
    return None


def _recorded(network: nn.Module, loss: Callable, inputs: object, targets: object) -> dict[str, _Call]:
    """One forward and backward pass of a copy, and what each module saw in it."""
    network, calls = copy.deepcopy(network), {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            if name in calls or not (isinstance(output, Tensor) and output.is_floating_point()):
                return
            calls[name] = call = _Call(_fresh(args), _fresh(kwargs))
            if output.requires_grad:
                output.register_hook(lambda gradient: setattr(call, "gradient", gradient.clone()))

        return hook

    started: list[str] = []
    for name, module in network.named_modules():
        module.register_forward_pre_hook(lambda m, a, name=name: started.append(name))
        module.register_forward_hook(keep(name), with_kwargs=True)
    loss(network(inputs), targets).backward()
    return {name: calls[name] for name in dict.fromkeys(started) if name in calls}


def _compare(mine: nn.Module, theirs: nn.Module, call: _Call, fold: Callable, name: str) -> dict[str, float]:
    mine, theirs = copy.deepcopy(mine), copy.deepcopy(theirs)
    results = [list(_passes(m, call)) for m in (mine, theirs)]
    errors = {p: _error(b, a) for (p, a), (_, b) in zip(*results, strict=True) if a.shape == b.shape}
    prefix = f"{name}." if name else ""
    for pass_, tensors in (("weight gradient", _gradients), ("buffer", _buffers)):
        own = {prefix + n: t for n, t in tensors(mine).items()}
        other = fold({prefix + n: t for n, t in tensors(theirs).items()})
        names = [n for n in own if n in other and own[n].shape == other[n].shape]
        errors[pass_] = _error(flat(other[n] for n in names), flat(own[n] for n in names)) if names else 0.0
    return errors


def _passes(module: nn.Module, call: _Call) -> Iterator[tuple[str, Tensor]]:
    """Forward, input gradient and eval of one module on the recorded call."""
    torch.manual_seed(0)  # the same masks for random layers
    args, kwargs = _fresh(call.args), _fresh(call.kwargs)
    output = module(*args, **kwargs)
    yield "forward", outputs_as_vector(output)
    if output.shape == call.gradient.shape and output.requires_grad:
        output.backward(call.gradient)
    leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
    yield "input gradient", flat(t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves)
    with torch.no_grad():
        yield "eval", outputs_as_vector(module.eval()(*_fresh(call.args), **_fresh(call.kwargs)))


def _error(value: Tensor, truth: Tensor) -> float:
    return float(relative_distance(value, truth)) if truth.numel() else 0.0


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in parameters.items()}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in module.named_buffers() if b.is_floating_point()}


def _fresh(values):
    """Copies without a graph, leaves of their own; which of them carry a gradient stays as it was."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), values
    )
