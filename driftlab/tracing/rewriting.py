"""What operations make, changed as soon as it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.arithmetic.shadow import held, plain
from driftlab.network.calling import each_tensor, tensors_in
from driftlab.network.compiled import DispatchMode
from driftlab.tracing.rows import Rows

# Writes into a tensor.
Change = Callable[[Tensor], None]


class Rewriter(DispatchMode):
    """Inside, what operations make is changed, or what they are given.

    Args:
        changes: by the number of the operation, and the place among its results, as in ``Value.made_by``.
        given: by the number of the operation, the numbers of an argument and those that are given instead.
    """

    def __init__(
        self,
        changes: Mapping[tuple[int, int], Change],
        given: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ):
        super().__init__()
        self._changes, self._operations, self._at = changes, 0, {number for number, _ in changes}
        self._given = given or {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._operations += 1
        if self._operations in self._given:
            give = partial(_other_than, *self._given[self._operations])
            args, kwargs = each_tensor(give, (args, kwargs))
        out = func(*args, **kwargs)
        if self._operations in self._at:
            for place, tensor in enumerate(all_made(written_by(func, args, kwargs), out)):
                if (change := self._changes.get((self._operations, place))) is not None:
                    change(tensor)
        return out


def instead(values: Tensor, rows: Rows | None = None) -> Change:
    """Other values, as many; or of these rows, where it has them."""
    return partial(_put, values, rows)


def _put(values: Tensor, rows: Rows | None, tensor: Tensor) -> None:
    with writing(tensor) as own:
        if rows is None or values.numel() == own.numel():
            own.copy_(values.reshape(tensor.shape))
        else:
            rows.put(values, own)


def _other_than(numbers: Tensor, values: Tensor, tensor: Tensor) -> Tensor:
    """A tensor as it is, or of other values if it has these numbers."""
    own = plain(tensor).squeeze()
    if own.shape != numbers.shape or not torch.equal(own.cpu(), numbers):
        return tensor
    other = tensor.clone()
    _put(values, None, other)
    return other


def move(tensor: Tensor) -> None:
    """In place, each number by some hundredths of itself and a little more."""
    generator = torch.Generator().manual_seed(0)
    with writing(tensor) as values:
        factors, more = (torch.randn(values.shape, generator=generator).to(values) for _ in range(2))
        values.mul_(1 + 1e-2 * factors).add_(1e-3 * more)


@contextmanager
def writing(tensor: Tensor) -> Iterator[Tensor]:
    """Its numbers, to be written into; those in memory of what is expanded."""
    with _disable_current_modes(), torch.no_grad():
        values = held(tensor)
        if any(n > 1 and not step for n, step in zip(values.shape, values.stride(), strict=True)):
            values = torch.empty(0).to(values).set_(values.untyped_storage())
        yield values


def written_by(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """What an operation writes into."""
    found = []
    for number, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found


def all_made(written: list[Tensor], out: object) -> list[Tensor]:
    """What an operation wrote into, and what it made."""
    return written + [t for t in tensors_in(out) if not any(t is w for w in written)]
