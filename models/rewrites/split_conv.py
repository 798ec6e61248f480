"""One conv as several smaller ones: along the output channels (cat) or along the input channels (sum)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from models.rewrites.swap import Join, RewriteError, conv_like, swap_convs


class SideBySide(nn.Module):
    """Convs beside each other: [..., C, H, W] -> their outputs, concatenated along the channels.

    Args:
        windows: for each conv the first input channel that it reads, and how many.
    """

    def __init__(self, convs: Iterable[nn.Conv2d], windows: Iterable[tuple[int, int]]):
        super().__init__()
        self.parts = nn.ModuleList(convs)
        self.windows = tuple(windows)

    def read(self, x: Tensor, index: int) -> Tensor:
        """What part ``index`` sees of the input."""
        first, count = self.windows[index]
        # A conv that reads everything is given x itself, as anyone would write it, not a view of all of x.
        return x if count == x.shape[-3] else x.narrow(-3, first, count)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(self.read(x, index)) for index, part in enumerate(self.parts)], dim=-3)


class SummedSlices(nn.Module):
    """Convs over slices of the input channels: [..., C, H, W] -> the sum of their outputs, first to last.

    Args:
        groups: of the original conv; the slices are of each group's input channels.
        sizes: the channels of each slice, per group.
    """

    def __init__(self, convs: Iterable[nn.Conv2d], groups: int, sizes: Sequence[int]):
        super().__init__()
        self.parts = nn.ModuleList(convs)
        self.groups = groups
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        by_group = x.unflatten(-3, (self.groups, sum(self.sizes)))
        slices = (piece.flatten(-4, -3) for piece in by_group.split(self.sizes, dim=-3))
        first, *rest = [part(piece) for part, piece in zip(self.parts, slices, strict=True)]
        return sum(rest, start=first)


def split_conv(
    model: nn.Module,
    dim: str = "out",
    parts: int = 2,
    sizes: Sequence[int] | None = None,
    match: str | Iterable[str] | None = None,
) -> nn.Module:
    """Split convs of ``model``, in place, into nn.Conv2d submodules with parameters of their own.

    With groups, along "out" a part lies within one group or covers whole groups, and reads the input
    channels of those groups only; along "in" the input channels of every group are sliced alike.

    Args:
        dim: "out": y is the concatenation of convs that each give a slice of the output channels (the
            weight split along dim 0). "in": y is the sum of convs that each read a slice of the input
            channels (the weight split along dim 1, the bias in the first).
        parts: how many, as equal as possible, the larger ones first.
        sizes: the channels of each part instead; one may be -1, the rest: [1, -1] is one against all others.
        match: which convs, as in ``swap_convs``; None for every conv that can be split so.

    Raises:
        RewriteError: parts or sizes do not fit a conv, or ``match`` does not fit the model.
    """
    if dim not in ("out", "in"):
        raise RewriteError(f"split_conv: dim={dim!r} is neither 'out' nor 'in'; write one of the two")
    sizes = None if sizes is None else list(sizes)
    _check_options(parts, sizes)

    def along_out(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        what = f"{name} has {conv.out_channels} output channels"
        return split_outputs(conv, _part_sizes(conv.out_channels, parts, sizes, what), name)

    def along_in(conv: nn.Conv2d, name: str) -> tuple[nn.Module, dict[str, Join]]:
        inputs = conv.in_channels // conv.groups
        what = f"{name} has {inputs} input channels" + (" per group" if conv.groups > 1 else "")
        return split_inputs(conv, _part_sizes(inputs, parts, sizes, what))

    return swap_convs(model, along_out if dim == "out" else along_in, match)


def split_outputs(
    conv: nn.Conv2d, sizes: Sequence[int], name: str, kind: type[SideBySide] = SideBySide
) -> tuple[SideBySide, dict[str, Join]]:
    """``conv`` as convs with sizes[i] output channels each, in a ``kind``, and the joins of its tensors."""
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    convs, windows = [], []
    for stop, count in zip(accumulate(sizes), sizes, strict=True):
        start = stop - count
        group, whole = start // outputs, start % outputs == 0 and stop % outputs == 0
        if not whole and (stop - 1) // outputs != group:
            works = sizes_for_groups(conv.out_channels, conv.groups, len(sizes))
            raise RewriteError(
                f"split_conv: {name} has {conv.groups} groups of {outputs} output channels, and a part with "
                f"channels {start} to {stop - 1} cuts through one; write, for example, sizes={works}"
            )
        groups = count // outputs if whole else 1
        bias = None if conv.bias is None else conv.bias[start:stop]
        convs.append(conv_like(conv, conv.weight[start:stop], bias, groups))
        windows.append((group * inputs, groups * inputs))
    join = Join(0, tuple(f"parts.{i}.weight" for i in range(len(sizes))), tuple(sizes))
    joins = {"weight": join}
    if conv.bias is not None:
        joins["bias"] = join._replace(sources=tuple(f"parts.{i}.bias" for i in range(len(sizes))))
    return kind(convs, windows), joins


def split_inputs(conv: nn.Conv2d, sizes: Sequence[int]) -> tuple[SummedSlices, dict[str, Join]]:
    """``conv`` as a sum of convs that read sizes[i] input channels a group, and the joins of its tensors."""
    weights = conv.weight.split(list(sizes), dim=1)
    biases = [conv.bias] + [None] * (len(sizes) - 1)
    convs = [conv_like(conv, w, b, conv.groups) for w, b in zip(weights, biases, strict=True)]
    joins = {"weight": Join(1, tuple(f"parts.{i}.weight" for i in range(len(sizes))), tuple(sizes))}
    if conv.bias is not None:
        joins["bias"] = Join(0, ("parts.0.bias",), (conv.out_channels,))
    return SummedSlices(convs, conv.groups, sizes), joins


def equal_sizes(total: int, parts: int) -> list[int]:
    """``total`` in ``parts``, as equal as possible, the larger first: 513 in 2 is [257, 256]."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def sizes_for_groups(channels: int, groups: int, parts: int) -> list[int]:
    """Sizes for ``parts`` parts, none of which cuts through a group."""
    each = channels // groups
    if parts <= groups:
        return [each * count for count in equal_sizes(groups, parts)]
    return [size for count in equal_sizes(parts, groups) for size in equal_sizes(each, count)]


def _check_options(parts: int, sizes: list[int] | None) -> None:
    if not isinstance(parts, int) or parts < 1:
        raise RewriteError(f"split_conv: parts={parts!r} must be a whole number, 1 or more")
    if sizes is None:
        return
    if not sizes or any(not isinstance(s, int) or s < -1 or s == 0 for s in sizes) or sizes.count(-1) > 1:
        raise RewriteError(
            f"split_conv: sizes={sizes} must be whole numbers of 1 or more, and at most one -1 for the rest"
        )


def _part_sizes(total: int, parts: int, sizes: list[int] | None, what: str) -> list[int]:
    if sizes is None:
        if parts > total:
            raise RewriteError(f"split_conv: {what}, too few for parts={parts}; write parts={total} or fewer")
        return equal_sizes(total, parts)
    known = sum(size for size in sizes if size != -1)
    if known != total if -1 not in sizes else known >= total:
        raise RewriteError(
            f"split_conv: {what}, which sizes={sizes} do not add up to; write, for example, sizes="
            f"{[1, -1] if total > 1 else [1]}, where -1 is the rest"
        )
    return [total - known if size == -1 else size for size in sizes]
