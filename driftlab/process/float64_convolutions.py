"""float64 convolutions on a CPU, a few images at a time.

torch has no float64 kernel of oneDNN's: it unfolds the images into a matrix, kernel height * width times
their size, and multiplies that. Of a whole batch the matrix is larger than the cache, and often larger than
what a process keeps of its memory: then each one is fresh pages, which the operating system fills with zeros.
Of a few images it stays in the cache (blocking: Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", ACM TOMS 34(3), 2008), and takes next to no memory. The arithmetic is torch's own: an image's
result and its gradient are the same bits; the weight's gradient is summed in another order.

Registered with torch's dispatcher in the place of its kernel ``_slow_conv2d``, which it calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

# Bytes of the matrix of the images that are unfolded at a time, for each thread. A step of the thin ResNet18
# took 0.82 s so, 0.88 with 0.5 or 8 MiB (three arms, batch 64, medians of 8).
AT_A_TIME = 2 * 2**20

_now = threading.local()


@contextmanager
def faster(wanted: bool) -> Iterator[None]:
    """Inside, ``computing`` is at work where it is ``wanted`` and this torch lets its kernels be replaced."""
    before, _now.wanted = is_wanted(), wanted and hasattr(torch.library, "get_kernel")
    try:
        yield
    finally:
        _now.wanted = before


def is_wanted() -> bool:
    return getattr(_now, "wanted", False)


@contextmanager
def computing() -> Iterator[None]:
    """Inside ``faster``, in this thread: float64 convolutions on a CPU, and their gradients, are made so."""
    if is_wanted():
        _register()
    before, _now.on = getattr(_now, "on", False), is_wanted()
    try:
        yield
    finally:
        _now.on = before


@cache
def _register() -> torch.library.Library:
    """Once a process, when it is first needed; a library that nobody holds is taken back."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("_slow_conv2d_forward", _forward),
        ("_slow_conv2d_backward.output_mask", _backward),
    ):
        own = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, _instead_of(own, kernel), "CPU", with_keyset=True)
    return library


def _instead_of(own: Any, kernel: Callable) -> Callable:
    """The kernel with torch's ``own`` for each of its calls, and for what it is not made for."""

    def chosen(keys: object, *given: Any) -> object:
        images, weight = given[:2] if kernel is _forward else given[1:3]
        many = images_at_a_time(images, weight) if getattr(_now, "on", False) else 0
        ours = partial(own.call_boxed, keys)
        return kernel(ours, many, *given) if 0 < many < len(images) else ours(*given)

    return chosen


def images_at_a_time(images: Tensor, weight: Tensor) -> int:
    """Of (n, channels, height, width) and (out, channels, height, width); 0 of what is not float64 in 4D."""
    if images.dtype is not torch.float64 or images.dim() != 4:
        return 0
    unfolded = images[0].numel() * weight[0, 0].numel() * images.element_size()
    return torch.get_num_threads() * max(1, AT_A_TIME // max(1, unfolded))


def _forward(own: Callable, many: int, images: Tensor, *others: Any) -> Tensor:
    return torch.cat([own(few, *others) for few in images.split(many)])


def _backward(
    own: Callable, many: int, gradient: Tensor, images: Tensor, *others: Any
) -> list[Tensor | None]:
    """Gradients of images, weight and bias, of those that are wanted."""
    parts = [own(g, few, *others) for g, few in zip(gradient.split(many), images.split(many), strict=True)]
    of_images, of_weight, of_bias = zip(*parts, strict=True)
    return [_joined(torch.cat, of_images), _joined(_sum, of_weight), _joined(_sum, of_bias)]


def _joined(join: Callable, parts: Sequence[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else join(parts)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total, *others = parts
    for part in others:
        total += part
    return total
