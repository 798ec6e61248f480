"""Mistakes in how weights and buffers are used: one that is not, two in each other's place, one too late.

And modules that train where they ought to evaluate, or the other way round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import combinations
from types import CodeType, FunctionType

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from driftlab.arithmetic.shadow import held
from driftlab.network.modules import common
from driftlab.network.start import owner
from driftlab.tracing.prints import of_zeros_and_ones

# Of as many weights of one shape that lie side by side any two may be exchanged: query, key, value, output.
SIDE_BY_SIDE = 6
# Of rotary positions, in models that are published; and what frequencies are scaled by.
BASES = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6)
FACTORS = (0.5, 2.0, 2 * math.pi, 0.5 / math.pi)


def weight_mutations(
    network: nn.Module, left: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The module that owns them, what is changed in words, and what changes it in a network.

    Args:
        left: buffers that a call changes, as it leaves them.
    """
    for name, tensor in _tensors(network).items():
        yield owner(name), f"`{name}` left out", partial(_set, {name: torch.zeros(())})
        if _is_mask(values := held(tensor).detach()):
            yield owner(name), f"`{name}` turned over", partial(_set, {name: 1 - values})
    for one, other in (*_pairs(_own(network)), *_pairs(_modules(network))):
        owners = owner(one[0]), owner(other[0])
        names = (one[0], other[0]) if len(one) == 1 else owners
        words = f"`{names[0]}` and `{names[1]}` exchanged"
        yield common(owners), words, partial(_exchange, dict(zip(one, other, strict=True)))
    for name, tensor in left.items():
        yield owner(name), f"`{name}` as the call leaves it", partial(_set, {name: tensor})


def _is_mask(values: Tensor) -> bool:
    return of_zeros_and_ones(values) and bool((values == 0).any() and (values == 1).any())


def other_frequencies(network: nn.Module) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The same of buffers of frequencies, which rotary and sinusoidal positions are made of."""
    for name, buffer in network.named_buffers():
        for words, other in _frequencies(held(buffer).detach()) if buffer.is_floating_point() else ():
            yield owner(name), f"`{name}` {words}", partial(_set, {name: other})


def _frequencies(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of a geometric row ``base ** (-i / n)`` others: of another base or range, one on, in other units.

    None of what is no such row.
    """
    steps = values[1:] / values[:-1] if values.dim() == 1 and len(values) > 2 else values.new_zeros(1)
    falls = float(steps[0])
    if not 0 < falls < 1 or not torch.allclose(steps, steps[:1], rtol=1e-4):
        return
    n, first = len(values), values[0]
    bases = (math.log(base) / (-n * math.log(falls)) for base in BASES)
    powers = {round(power, 5): power for power in (*bases, 0.5, 2.0, n / (n - 1), (n - 1) / n)}
    for power in (p for near, p in powers.items() if near != 1):  # none twice, nor its own
        yield f"to the power of {power:.4g}", first * (values / first) ** power
    for factor in (falls, 1 / falls, *FACTORS):
        yield f"times {factor:.4g}", values * factor


def turned_weights(network: nn.Module) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The same of weights whose numbers stand in another's place of the same weight.

    Of heads of every size: halves that are turned against each other, as of rotary positions, for neighbours
    that are, and the other way round; a weight that has a row for each of several uses the first of them.
    """
    for name, tensor in _tensors(network).items():
        values = held(tensor).detach()
        for words, other in _turned(values):
            if not torch.equal(other, values):
                yield owner(name), f"`{name}` with {words}", partial(_set, {name: other})


def _turned(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    if values.dim() > 1:
        yield "its first row for all", values[:1].expand_as(values).clone()
        return
    sizes = [s for s in range(4, len(values) + 1, 2) if len(values) % s == 0] if values.dim() else []
    for size in sizes:
        for words, shape in (("halves", (-1, 2, size // 2)), ("neighbours", (-1, size // 2, 2))):
            other = values.unflatten(0, shape).transpose(1, 2).flatten()
            yield f"the {words} of every {size} where the others are", other


def other_modes(network: nn.Module) -> Iterator[tuple[str, str, Callable[[nn.Module], None]]]:
    """The same of modules that do something else in eval mode: one alone in the other mode."""
    for name, module in network.named_modules():
        drops_none = isinstance(module, _DropoutNd) and not module.p
        if not drops_none and any("training" in code.co_names for code in _codes(type(module))):
            yield name, f"`{name}` in the other mode", partial(_in_the_other_mode, name)


def _codes(type_: type) -> Iterator[CodeType]:
    """Of the methods that it does not have of ``nn.Module``."""
    for own in type_.__mro__[: type_.__mro__.index(nn.Module)]:
        yield from (f.__code__ for f in vars(own).values() if isinstance(f, FunctionType))


def _in_the_other_mode(name: str, network: nn.Module) -> None:
    def turn(module: nn.Module, *_: object) -> None:
        module.training = not module.training

    module = network.get_submodule(name)
    module.register_forward_pre_hook(turn)
    module.register_forward_hook(turn)


def _pairs(alike: Mapping[Hashable, list[list[str]]]) -> Iterator[tuple[list[str], list[str]]]:
    for found in alike.values():
        yield from combinations(found, 2) if len(found) <= SIDE_BY_SIDE else ()


def _own(network: nn.Module) -> dict[Hashable, list[list[str]]]:
    """The tensors of one module, by their shapes."""
    alike: dict[Hashable, list[list[str]]] = defaultdict(list)
    for name, tensor in _tensors(network).items():
        alike[owner(name), tensor.shape, tensor.requires_grad].append([name])
    return alike


def _modules(network: nn.Module) -> dict[Hashable, list[list[str]]]:
    """All tensors of each module beside another, by their shapes."""
    alike: dict[Hashable, list[list[str]]] = defaultdict(list)
    for name, module in network.named_modules():
        tensors = _tensors(module) if name else {}
        if tensors:
            shapes = tuple((own, tensor.shape) for own, tensor in tensors.items())
            alike[owner(name), shapes].append([f"{name}.{own}" for own in tensors])
    return alike


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    both = dict(network.named_parameters()) | dict(network.named_buffers())
    return {name: tensor for name, tensor in both.items() if tensor.is_floating_point()}


@torch.no_grad()
def _set(values: Mapping[str, Tensor], network: nn.Module) -> None:
    own = _tensors(network)
    for name, value in values.items():
        held(own[name]).copy_(value)


def _exchange(pairs: Mapping[str, str], network: nn.Module) -> None:
    own = _tensors(network)
    both = [*pairs.items(), *((other, one) for one, other in pairs.items())]
    _set({one: held(own[other]).clone() for one, other in both}, network)
