"""Where two networks part whose modules cannot be paired: by the values that pass through them.

A candidate built in another way, under other names, still has to come by what the reference's layers give.
So the reference is run in float64, and every tensor that the candidate makes on the way is looked up, in any
order and layout: number of entries, sum of absolute values, 2-norm. The first layer whose result the
candidate never has, though it has what went into it, is where they part; backward likewise, from the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.network.calling import cast, copied, named_leaves, seed_random_layers

Print = tuple[int, float, float]
# Two float64 computations of the same layer agree to more digits than this, deep networks included.
AGREE = 1e-9
# Below this share of layers found, the candidate computes otherwise altogether, and nothing is said.
ENOUGH = 0.5


@dataclass
class _Call:
    module: str
    inputs: list[Print]
    outputs: list[Print] = field(default_factory=list)
    gradients: list[Print] = field(default_factory=list)
    input_gradients: list[Print] = field(default_factory=list)


class _Seen(TorchDispatchMode):
    """The prints of every floating tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.prints: dict[int, list[tuple[float, float]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import it first: two seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                size, *numbers = _print(tensor)
                self.prints.setdefault(size, []).append(tuple(numbers))
        return out

    def has(self, wanted: list[Print]) -> bool:
        return all(any(_near(w, (w[0], *p)) for p in self.prints.get(w[0], ())) for w in wanted)


def _print(tensor: Tensor) -> Print:
    values = tensor.detach().double()
    return values.numel(), float(values.abs().sum()), float(torch.linalg.vector_norm(values))


def _near(a: Print, b: Print) -> bool:
    return all(abs(x - y) <= AGREE * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def parting(
    reference: nn.Module, candidate: nn.Module, whole: Recorded, seed: int = 0
) -> tuple[str, str] | None:
    """The module of the reference, and the pass, where the two part; None where that cannot be told.

    Both must run in float64. "" is the network's own code.
    """
    calls = _leaf_calls(reference, whole, seed)
    seen = _Seen()
    with seen:
        _step(copied(candidate).double(), whole, seed)
    found = [seen.has(call.outputs) for call in calls]
    if not calls or sum(found) < ENOUGH * len(calls):
        return None
    return _forward(calls, found, seen) or _backward(calls, seen)


def _forward(calls: list[_Call], found: list[bool], seen: _Seen) -> tuple[str, str] | None:
    for index, (call, right) in enumerate(zip(calls, found, strict=True)):
        if not right and not _passed_on(call, calls[index + 1 :], found[index + 1 :]):
            before = calls[index - 1].module if index else ""
            return (call.module if seen.has(call.inputs) else _above(before, call.module)), "forward"
    return None


def _passed_on(call: _Call, later: list[_Call], found: list[bool]) -> bool:
    """Whether what was made of its result is there, so that it was right, and part of something larger."""
    consumers = [right for c, right in zip(later, found, strict=True) if set(call.outputs) & set(c.inputs)]
    return any(consumers)


def _backward(calls: list[_Call], seen: _Seen) -> tuple[str, str] | None:
    after = ""
    for call in reversed(calls):
        if call.gradients and not seen.has(call.gradients):
            return _above(call.module, after), "input gradient"
        if call.input_gradients and not seen.has(call.input_gradients):
            return call.module, "input gradient"
        after = call.module
    return None


def _above(one: str, other: str) -> str:
    """The innermost module that holds both, and is neither."""
    shared = []
    for a, b in zip(one.split(".")[:-1], other.split(".")[:-1], strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared)


def _leaf_calls(reference: nn.Module, whole: Recorded, seed: int) -> list[_Call]:
    """Every call of every module that has none below it, in the order of execution, in float64."""
    network, calls = copied(reference).double(), []
    for name, module in network.named_modules():
        if name and next(module.children(), None) is None:
            _watch(module, name, calls)
    _step(network, whole, seed)
    return calls


def _watch(module: nn.Module, name: str, calls: list[_Call]) -> None:
    waiting: list[_Call] = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        floats = [
            t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()
        ]
        call = _Call(name, [_print(t) for t in floats])
        for tensor in floats:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(
                    lambda g: call.input_gradients.append(_print(g)) if len(floats) == 1 else None
                )
        waiting.append(call)

    def after(_: nn.Module, args: tuple, output: object) -> None:
        call = waiting.pop()
        for tensor in named_leaves(output).values():
            call.outputs.append(_print(tensor))
            if tensor.requires_grad:
                tensor.register_hook(lambda g: call.gradients.append(_print(g)))
        calls.append(call)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _step(network: nn.Module, whole: Recorded, seed: int) -> None:
    args, kwargs = cast(own_inputs(whole), torch.float64)
    seed_random_layers(seed)
    whole.send_back(whole.call(network, args, kwargs), "float64")
