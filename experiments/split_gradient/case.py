"""A convolution and how it is split: the sizes, and the numbers that are drawn for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.command.errors import ConfigurationError

MANY = 6  # parts: more of them are counted, not listed
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Case:
    """A square convolution without bias, padding or stride, and its parts along the output channels.

    Attributes:
        split: the output channels of each part; they add up to ``out_channels``.
        image_size: height and width of the input.
    """

    in_channels: int
    out_channels: int
    kernel_size: int
    split: tuple[int, ...]
    batch: int
    image_size: int

    @property
    def output_size(self) -> int:
        return self.image_size - self.kernel_size + 1

    @property
    def title(self) -> str:
        """As ``str``, with many parts counted."""
        if len(self.split) <= MANY:
            return str(self)
        first, *_, last = self.split
        return self._with_parts(f"{first} + … + {last} ({len(self.split)} parts)")

    def __str__(self) -> str:
        return self._with_parts(" + ".join(map(str, self.split)))

    def _with_parts(self, parts: str) -> str:
        return (
            f"Conv2d({self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, bias=False) "
            f"split {parts}, input [{self.batch}, {self.in_channels}, {self.image_size}, {self.image_size}]"
        )


def read_case(given: Mapping, place: str) -> Case:
    """The case that stands in the settings under ``place``. Raises ConfigurationError, one line."""
    sizes = {key: given[key] for key in given if key != "split"}
    if sizes["image_size"] < sizes["kernel_size"]:
        raise ConfigurationError(
            f"{place}.image_size={sizes['image_size']} is smaller than {place}.kernel_size="
            f"{sizes['kernel_size']}: write {sizes['kernel_size']} or more"
        )
    return Case(split=_parts(given["split"], sizes["out_channels"], f"{place}.split"), **sizes)


def _parts(given: Sequence[int], channels: int, place: str) -> tuple[int, ...]:
    """The sizes with -1 replaced by the rest."""
    sizes = list(given)
    example = f"write, for example, {place}=[1,-1], where -1 is the rest"
    if channels < 2:
        raise ConfigurationError(f"{place}: 1 output channel cannot be split; give out_channels of 2 or more")
    if 0 in sizes or len(sizes) < 2 or sizes.count(-1) > 1:
        raise ConfigurationError(
            f"{place}={sizes} is no list of two sizes or more, each at least 1: {example}"
        )
    known = sum(s for s in sizes if s != -1)
    if known >= channels if -1 in sizes else known != channels:
        raise ConfigurationError(
            f"{place}={sizes} does not add up to {channels} output channels, 1 or more each: {example}"
        )
    return tuple(channels - known if s == -1 else s for s in sizes)


@dataclass(frozen=True)
class Operands:
    """The numbers that go in.

    Attributes:
        weight: [out, in, k, k].
        inputs: [batch, in, size, size].
        gradient: of the output, [batch, out, size - k + 1, size - k + 1].
    """

    weight: Tensor
    inputs: Tensor
    gradient: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Operands:
        return Operands(change(self.weight), change(self.inputs), change(self.gradient))

    def to(self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> Operands:
        return self.map(lambda t: t.to(device, dtype).contiguous(memory_format=LAYOUTS[layout]))


def draw_as_asked(case: Case, seed: int) -> Operands:
    """As in the thread: the initial weights of a convolution, inputs ``rand``, an output gradient of ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        conv = nn.Conv2d(case.in_channels, case.out_channels, case.kernel_size, bias=False)
        inputs = torch.rand(case.batch, case.in_channels, case.image_size, case.image_size)
    ones = torch.ones(case.batch, case.out_channels, case.output_size, case.output_size)
    return Operands(conv.weight.detach(), inputs, ones)


def draw(case: Case, seed: int, data: str) -> Operands:
    """All three drawn alike, in float32: "zero mean" from N(0, 1), "positive" from U(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn if data == "zero mean" else torch.rand
    shapes = (
        (case.out_channels, case.in_channels, case.kernel_size, case.kernel_size),
        (case.batch, case.in_channels, case.image_size, case.image_size),
        (case.batch, case.out_channels, case.output_size, case.output_size),
    )
    return Operands(*(sample(shape, generator=generator) for shape in shapes))


def with_53_bits(operands: Operands, seed: int) -> Operands:
    """Weights and inputs in float64 with random digits below their float32 ones; the gradient as it is.

    A float32 value that is cast to float64 ends in 29 zero bits, so that sums of such values are often
    exact there and show no rounding at all.
    """
    generator = torch.Generator().manual_seed(seed)

    def filled(tensor: Tensor) -> Tensor:
        digits = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
        return tensor.double() * (1 + digits * 2.0**-24)

    return Operands(filled(operands.weight), filled(operands.inputs), operands.gradient.double())
