"""Operations whose kernels may round to fewer bits or sum in any order, each with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Operation:
    """One operation, forward and backward.

    Attributes:
        inputs: by name, drawn in float32 on the CPU; those that are floating get a gradient.
        call: of the inputs, in order.
        dtype: in which a GPU is asked for it.
        repeats: whether torch has an algorithm for it that repeats itself.
    """

    name: str
    inputs: Callable[[], Tensors]
    call: Callable[..., Tensor]
    dtype: torch.dtype = torch.float32
    repeats: bool = True


def operations(smoke: bool) -> Iterator[Operation]:
    """Sizes of a ResNet18 at full width where it has the operation."""
    batch, channels, side = (2, 8, 8) if smoke else (32, 64, 32)
    image = partial(_conv, batch, channels, side)
    pad = {"padding": 1}
    yield Operation("conv2d", image, partial(F.conv2d, **pad))
    yield Operation("conv2d, stride 2", image, partial(F.conv2d, stride=2, **pad))
    yield Operation("conv2d, 2 groups", partial(image, groups=2), partial(F.conv2d, groups=2, **pad))
    deep = partial(_conv, batch, 8 * channels, max(4, side // 8))
    yield Operation("conv2d, 512 channels", deep, partial(F.conv2d, **pad))
    depthwise = partial(F.conv2d, groups=channels, **pad)
    yield Operation("conv2d, depthwise", partial(image, groups=channels), depthwise)
    wide = 8 * channels
    yield Operation("matmul", lambda: _normal(input=(wide, wide), weight=(wide, wide)), torch.matmul)
    yield Operation("LSTM", partial(_lstm, batch, side, channels), _run_lstm)
    yield from _attentions(batch, 4 * side, channels)
    images = lambda: _normal(input=(batch, channels, side, side))  # noqa: E731
    yield Operation("batch norm", partial(_norm, batch, channels, side), _batch_norm)
    yield Operation("max pool", images, partial(F.max_pool2d, kernel_size=3, stride=2, padding=1))
    yield Operation("upsample, bilinear", images, partial(F.interpolate, scale_factor=2, mode="bilinear"))
    yield Operation("upsample, nearest", images, partial(F.interpolate, scale_factor=2))
    yield Operation("cross entropy of maps", partial(_classes, batch, channels, side), F.cross_entropy)
    yield Operation(
        "embedding", partial(_rows, 16 * wide, channels), lambda input, at: F.embedding(at, input)
    )
    sums = partial(_rows, 16 * wide, channels, given=16 * wide)
    yield Operation(
        "index_add", sums, lambda input, at: input.new_zeros(16, channels).index_add(0, at, input)
    )
    scattered = lambda input, at: input.new_zeros(16, channels).scatter_add(  # noqa: E731
        0, at[:, None].expand_as(input), input
    )
    yield Operation("scatter_add", sums, scattered, repeats=False)


def _attentions(batch: int, length: int, size: int) -> Iterator[Operation]:
    """As torch chooses, and kernel by kernel: two of them take no float32."""
    names = ("query", "key", "value")
    given = lambda: _normal(**dict.fromkeys(names, (batch, 4, length, size)))  # noqa: E731
    yield Operation("attention, as torch chooses", given, F.scaled_dot_product_attention)
    for backend, dtype in (
        (SDPBackend.MATH, torch.float32),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    ):
        kind = "" if dtype is torch.float32 else ", bfloat16"
        name = f"attention, {backend.name.lower().removesuffix('_attention')}{kind}"
        yield Operation(name, given, partial(_attention, backend), dtype, backend is SDPBackend.MATH)


def _attention(backend: SDPBackend, *given: Tensor) -> Tensor:
    exact = given[0].dtype is torch.float64  # what it is held against
    with sdpa_kernel(SDPBackend.MATH if exact else backend):
        return F.scaled_dot_product_attention(*given)


def _normal(**shapes: tuple[int, ...]) -> Tensors:
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


def _conv(batch: int, channels: int, side: int, groups: int = 1) -> Tensors:
    return _normal(input=(batch, channels, side, side), weight=(channels, channels // groups, 3, 3))


def _norm(batch: int, channels: int, side: int) -> Tensors:
    return _normal(input=(batch, channels, side, side), weight=(channels,), bias=(channels,))


def _batch_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(input, None, None, weight, bias, training=True)


def _lstm(batch: int, length: int, size: int) -> Tensors:
    drawn = _normal(input=(batch, length, size), weight=(4 * size, size), recurrent=(4 * size, size))
    return {name: t if name == "input" else t / size**0.5 for name, t in drawn.items()}


def _run_lstm(input: Tensor, *weights: Tensor) -> Tensor:
    start = input.new_zeros(1, input.shape[0], input.shape[2])
    options = {"has_biases": False, "num_layers": 1, "dropout": 0.0, "train": True}
    return torch.lstm(input, (start, start), weights, **options, bidirectional=False, batch_first=True)[0]


def _classes(batch: int, channels: int, side: int) -> Tensors:
    at = torch.randint(channels, (batch, side, side), generator=torch.Generator().manual_seed(1))
    return _normal(input=(batch, channels, side, side)) | {"at": at}


def _rows(count: int, size: int, given: int = 16) -> Tensors:
    """Few rows, each wanted many times: their sums are long."""
    at = torch.randint(16, (count,), generator=torch.Generator().manual_seed(1))
    return _normal(input=(given, size)) | {"at": at}
