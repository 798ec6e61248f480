"""float64 convolutions on a CPU, by matrix products that copy nothing.

torch has no float64 kernel of oneDNN's: it unfolds the images into a matrix, k*k times their size, and
multiplies that. Here the padded images are one matrix with a row a pixel and a column a channel. A shift of
the kernel is then a slice of its rows, and the convolution is the sum over the k*k shifts of a slice times
the weights of that shift: k*k calls of dgemm, nothing unfolded. Rows beyond an image's edge are computed and
left out (Anderson, Vasudevan, Keane, Gregg, "Low-memory GEMM-based convolution algorithms for deep neural
networks", 2017, arXiv:1709.03395).

Registered with torch's dispatcher in the place of its own kernel of ``_slow_conv2d``, which goes on doing
whatever this one does not: other dtypes, strides, small images, and everything outside of ``faster``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

# Where it pays, measured against torch 2.15's own on one thread, forward and backward: 32x32 pixels 2 to 3.1
# times as fast with 8 to 64 channels, 16x16 1.1 to 1.6 times with 16 to 128; at 8x8 0.9 to 1.2, at 4x4
# slower; with 3 or 4 channels that come in, slower.
LEAST_PIXELS, LEAST_CHANNELS = 16 * 16, 8

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
    """The kernel with torch's ``own`` for whatever it is not made for."""

    def chosen(keys: object, *given: Any) -> object:
        # (images, weight, size, bias, stride, padding), or (gradient, images, weight, size, stride, ...)
        images, weight, stride = given[:2] + given[4:5] if kernel is _forward else given[1:3] + given[4:5]
        if getattr(_now, "on", False) and _is_for(images, weight, stride):
            return kernel(*given)
        return own.call_boxed(keys, *given)

    return chosen


def _is_for(images: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Of (n, channels, height, width) and (out, channels, k, k)."""
    sized = images.dim() == 4 and images.shape[2] * images.shape[3] >= LEAST_PIXELS
    shaped = images.shape[1] >= LEAST_CHANNELS and weight.shape[2:].numel() > 1
    return images.dtype is torch.float64 and sized and shaped and list(stride) == [1, 1]


class _Pixels:
    """Padded images as a matrix: a row a pixel, a column a channel.

    Attributes:
        shifts: (i, j) of the kernel -> how many rows further on lies the pixel that it reads.
        rows: of all padded images. The result has as many; those beyond an edge are left out of it.
    """

    def __init__(self, images: Tensor, weight: Tensor, padding: Sequence[int]):
        self.n, _, self.height, self.width = images.shape
        self.down, self.right = padding
        self.padded = self.n, self.height + 2 * self.down, self.width + 2 * self.right
        self.out = self.padded[1] - weight.shape[2] + 1, self.padded[2] - weight.shape[3] + 1
        self.rows = self.padded[0] * self.padded[1] * self.padded[2]
        self.shifts = {(i, j): i * self.padded[2] + j for i, j in product(*map(range, weight.shape[2:]))}
        self.furthest = max(self.shifts.values())

    def of_images(self, images: Tensor) -> Tensor:
        """(rows + furthest, channels), zeros at the end."""
        matrix = images.new_zeros(self.rows + self.furthest, images.shape[1])
        self._inside(matrix[: self.rows]).copy_(images.permute(0, 2, 3, 1))
        return matrix

    def of_gradient(self, gradient: Tensor) -> Tensor:
        """(furthest + rows, out channels), zeros in front and beyond the edges."""
        matrix = gradient.new_zeros(self.furthest + self.rows, gradient.shape[1])
        self._result(matrix[self.furthest :]).copy_(gradient.permute(0, 2, 3, 1))
        return matrix

    def at(self, shift: int, matrix: Tensor) -> Tensor:
        """What lies ``shift`` rows further on, of every pixel."""
        return matrix[shift : shift + self.rows]

    def as_images(self, matrix: Tensor) -> Tensor:
        return self._inside(matrix).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)

    def as_result(self, matrix: Tensor) -> Tensor:
        return self._result(matrix).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)

    def _inside(self, matrix: Tensor) -> Tensor:
        pixels = matrix.view(*self.padded, -1)
        return pixels[:, self.down : self.down + self.height, self.right : self.right + self.width]

    def _result(self, matrix: Tensor) -> Tensor:
        return matrix.view(*self.padded, -1)[:, : self.out[0], : self.out[1]]


def _forward(
    images: Tensor, weight: Tensor, size: object, bias: Tensor | None, stride: object, padding: Sequence[int]
) -> Tensor:
    pixels, of_shift = _Pixels(images, weight, padding), weight.permute(2, 3, 1, 0).contiguous()
    matrix = pixels.of_images(images)
    shifted = ((pixels.at(shift, matrix), of_shift[place]) for place, shift in pixels.shifts.items())
    result = pixels.as_result(_sum_of_products(shifted))
    return result if bias is None else result.add_(bias[:, None, None])


def _backward(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    size: object,
    stride: object,
    padding: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of images, weight and bias, of those that are wanted."""
    pixels = _Pixels(images, weight, padding)
    sent_back = pixels.of_gradient(gradient)
    of_images = of_weight = None
    if wanted[0]:
        of_shift, last = weight.permute(2, 3, 0, 1).contiguous(), pixels.furthest
        shifted = ((pixels.at(last - s, sent_back), of_shift[place]) for place, s in pixels.shifts.items())
        of_images = pixels.as_images(_sum_of_products(shifted))
    if wanted[1]:
        matrix, of_weight = pixels.of_images(images), torch.empty_like(weight)
        own = pixels.at(pixels.furthest, sent_back).t()
        for (i, j), shift in pixels.shifts.items():
            of_weight[:, :, i, j] = own @ pixels.at(shift, matrix)
    return of_images, of_weight, gradient.sum((0, 2, 3)) if wanted[2] else None


def _sum_of_products(pairs: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    total = torch.mm(*next(pairs))
    for first, second in pairs:
        total.addmm_(first, second)
    return total
