"""A network's tensors by name, as vectors in float64, and the positions of their elements.

A *position* counts elements through all tensors of a network, laid end to end: what finding a fold yields for
every element of a reference tensor is its position among the candidate's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from driftlab.blame import AboutThePair

Tensors = Mapping[str, Tensor]
Rewrite = Callable[[nn.Module], nn.Module]
# From the candidate's tensors by name to the reference's: the ``Fold`` that was found, or anybody's own.
AnyFold = Callable[[Tensors], Tensors]


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """‖a - b‖₂ / ‖b‖₂ as a float64 scalar on the device; 0 where a equals b, also where both are 0."""
    difference = torch.linalg.vector_norm(a - b)
    return torch.where(difference == 0, difference, difference / torch.linalg.vector_norm(b))


def index_of(place: int, shape: torch.Size) -> tuple[int, ...]:
    """Of an element, by its place in flat order. torch's own imports sympy first, which takes seconds."""
    return tuple(int(i) for i in np.unravel_index(place, shape))


def gradient_of(leaf: Tensor) -> Tensor:
    """Its gradient, dense (an embedding may send a sparse one); zeros where it has none."""
    if leaf.grad is None:
        return torch.zeros_like(leaf)
    return leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one float64 vector: one copy, whatever the dtypes."""
    return joined([t.detach().reshape(-1) for t in tensors])


def joined(vectors: list[Tensor]) -> Tensor:
    """One-dimensional tensors, end to end, in one float64 vector."""
    if not vectors:
        return torch.zeros(0, dtype=torch.float64)
    out = torch.empty(sum(v.numel() for v in vectors), dtype=torch.float64, device=vectors[0].device)
    return torch.cat(vectors, out=out)


def numbered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of their shapes, on their devices: serial numbers from 1 through all of them."""
    ends = accumulate(t.numel() for t in tensors.values())
    return {
        name: torch.arange(1 + end - t.numel(), 1 + end, dtype=torch.float64, device=t.device).view(t.shape)
        for (name, t), end in zip(tensors.items(), ends, strict=True)
    }


def moves_only(fold: Callable, numbered: Mapping[str, Tensor], numbers: Tensor) -> bool:
    """Whether a fold puts entries in other places and computes nothing, seen by serial numbers from 1.

    What adds or scales does not give the squares of its own results, what multiplies or drops signs does not
    give them less a constant; a zero that is filled in is no serial.
    """
    squares = flat(fold({name: t * t for name, t in numbered.items()}).values())
    below = flat(fold({name: 0.5 - t for name, t in numbered.items()}).values())
    same = torch.equal(squares, numbers * numbers) and torch.equal(below, 0.5 - numbers)
    return same and bool((numbers > 0).all())


class FoldError(AboutThePair, ValueError):
    """No fold, or not one that gives the reference's names and shapes; the message is one line."""


@dataclass(frozen=True)
class NamedTensors:
    """The parameters and buffers of a network in the order of definition.

    Attributes:
        tensors: name -> tensor; a shared one under its first name only, as in ``named_parameters()``.
        aliases: every other name of a shared tensor -> its first name.
        parameters: the names that are parameters.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    parameters: frozenset[str]

    def first_name(self, name: str) -> str | None:
        """The name under which ``tensors`` holds what is called ``name``; None where nothing is."""
        return name if name in self.tensors else self.aliases.get(name)


def named_tensors(module: nn.Module) -> NamedTensors:
    """All parameters and buffers of ``module``, buffers that no state dict keeps included.

    Raises:
        FoldError: a parameter has no shape yet (a lazy module).
    """
    tensors, aliases, parameters, names = {}, {}, set(), {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        own = child.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, tensor in chain(own, child.named_buffers(prefix, recurse=False, remove_duplicate=False)):
            if is_lazy(tensor):
                raise FoldError(f"{name} has no shape yet (a lazy module): run one batch through the network")
            if id(tensor) in names:
                aliases[name] = names[id(tensor)]
                continue
            names[id(tensor)] = name
            tensors[name] = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                parameters.add(name)
    return NamedTensors(tensors, aliases, frozenset(parameters))


class Layout:
    """Tensors laid end to end.

    Attributes:
        shapes: name -> shape.
        starts: name -> position of the tensor's first element.
        size: number of positions.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.starts: dict[str, int] = {}
        self.size = 0
        for name, tensor in tensors.items():
            self.starts[name] = self.size
            self.size += tensor.numel()
        self._names = [name for name, tensor in tensors.items() if tensor.numel()]
        self._bounds = torch.tensor([self.starts[name] for name in self._names], dtype=torch.int64)

    def positions(self, name: str) -> Tensor:
        """The positions of a tensor's elements, int64 in the tensor's shape."""
        shape, start = self.shapes[name], self.starts[name]
        count = torch.Size(shape).numel()
        return torch.arange(start, start + count).view(shape)

    def owners(self, positions: Tensor) -> Tensor:
        """For each position the number of the tensor that holds it; ``owner`` gives its name."""
        return torch.searchsorted(self._bounds, positions.contiguous(), right=True) - 1

    def owner(self, number: int) -> str:
        return self._names[number]

    def modules(self) -> Tensor:
        """For each number of a tensor that of its module, int64."""
        prefixes = [name.rpartition(".")[0] for name in self._names]
        numbers = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
        return torch.tensor([numbers[prefix] for prefix in prefixes], dtype=torch.int64)
