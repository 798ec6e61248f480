"""Indices that lie outside of what they index, seen before a GPU does.

On a CPU torch raises. On a GPU the kernel finds out, too late: a "device-side assert" ends all that this
process computes there, and what it has trained is lost. The networks are run on values of driftlab's own
(constants moved by a bit, another's values in the place of theirs), of which a network may make any index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from driftlab.blame import AboutThePair
from driftlab.network.compiled import DispatchMode

_MASKS = (torch.bool, torch.uint8)
Given = Mapping[str, Any]
Asked = tuple[Tensor, int, int]  # numbers, the least that each may be, and one more than the most


class OutOfBoundsError(AboutThePair, IndexError):
    """What a GPU would not have survived."""


def _of(source: str, index: str = "index", dim: str | None = "dim") -> Callable[[Given], Iterator[Asked]]:
    def asked(given: Given) -> Iterator[Asked]:
        shape = given[source].shape or (1,)
        yield given[index], 0, shape[given[dim] if dim else 0]

    return asked


def _of_several(given: Given) -> Iterator[Asked]:
    """``self[indices]``: integers count from either end, a mask stands for as many dimensions as it has."""
    shape, at = given["self"].shape, 0
    for index in given["indices"]:
        mask = index is not None and index.dtype in _MASKS
        if index is not None and not mask:
            yield index, -shape[at], shape[at]
        at += index.ndim if mask else 1


def _flat(given: Given) -> Iterator[Asked]:
    size = given["self"].numel()
    yield given["index"], -size, size


def _classes(given: Given) -> Iterator[Asked]:
    target, shape = given["target"], given["self"].shape
    yield target[target != given["ignore_index"]], 0, shape[1 if len(shape) > 1 else 0]


def _unpooled(given: Given) -> Iterator[Asked]:
    yield given["indices"], 0, prod(given["output_size"])


_ALONG = ("index_select", "index_add", "index_copy", "index_fill", "index_reduce", "gather", "scatter")
INDEXED: dict[str, Callable[[Given], Iterator[Asked]]] = {
    **dict.fromkeys((*_ALONG, "scatter_add", "scatter_reduce"), _of("self")),
    **dict.fromkeys(
        ("embedding", "embedding_bag", "embedding_bag_forward_only"), _of("weight", "indices", None)
    ),
    **dict.fromkeys(
        ("index", "unsafe_index", "index_put", "unsafe_index_put", "index_put_impl"), _of_several
    ),
    **dict.fromkeys(("take", "put"), _flat),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _unpooled),
}
# Not indices, but refused by the kernel in the same way.
ALLOWED: dict[str, Callable[[Given], Tensor]] = {
    "binary_cross_entropy": lambda given: (given["self"] >= 0) & (given["self"] <= 1),
    "bernoulli": lambda given: (given.get("p", given["self"]) >= 0) & (given.get("p", given["self"]) <= 1),
    "multinomial": lambda given: given["self"].isfinite() & (given["self"] >= 0),
    "repeat_interleave": lambda given: given["repeats"] >= 0,
    "masked_scatter": lambda given: given["mask"].sum() <= given["source"].numel(),
    "assert_async": lambda given: given["self"] != 0,
}


class _Bounds(DispatchMode):
    """Looks at what a GPU's kernels are given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.strip("_")
        if (name in INDEXED or name in ALLOWED) and func.namespace == "aten":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            if any(isinstance(value, Tensor) and value.is_cuda for value in given.values()):
                _look(name, given)
        return func(*args, **kwargs)


def within_bounds() -> AbstractContextManager:
    """Inside, a network on a GPU raises ``OutOfBoundsError`` where its kernels would end the process."""
    return _Bounds() if torch.cuda.is_initialized() else nullcontext()


def _look(name: str, given: Given) -> None:
    if (allowed := ALLOWED.get(name)) is not None:
        if _is_plain(given) and not bool(torch.as_tensor(allowed(given)).all()):
            raise OutOfBoundsError(f"{name} is given values that it does not take")
        return
    for index, least, end in INDEXED[name](given):
        if type(index) is Tensor and index.numel():
            low, high = (int(number) for number in index.aminmax())
            if low < least or high >= end:
                out = low if low < least else high
                raise OutOfBoundsError(f"index {out} is out of bounds in {name}, for a size of {end}")


def _is_plain(given: Given) -> bool:
    """Whether these are numbers: a shadow's come by here once more."""
    return all(type(value) is Tensor for value in given.values() if isinstance(value, Tensor))
