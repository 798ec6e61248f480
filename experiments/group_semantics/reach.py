"""Which channels reach which outputs, and which inputs are used: counted from gradients that are not zero.

Output o depends on channel i where d(output o) / d(channel i) is nonzero somewhere. Every position of an
output is weighted with a random number first, so that nothing cancels by symmetry; a gradient that is exactly
zero is then one that no path leads to, or that a ReLU or a max-pool shuts off on this input.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from models.grouped_net import GroupedNet

PLAIN, GROUPED, INTERLEAVED = "groups=1", "grouped", "interleaved"  # kinds of channels
BINS = 32  # the most on a side of a matrix that is kept for drawing
IMAGE = (7, 7)  # of the channels that conv2 reads, pixels: what is connected does not depend on it


def reach(outputs: Tensor, x: Tensor) -> Tensor:
    """Boolean [O, C]: which channels of x [N, C, H, W] the outputs [M, O, ...] depend on."""
    weights = torch.randn(outputs.shape, dtype=torch.float32).to(outputs)
    each = (outputs * weights).flatten(2).sum(2) if outputs.dim() > 2 else outputs * weights
    rows = [torch.autograd.grad(total, x, retain_graph=True)[0] for total in each.sum(0)]
    return torch.stack([(row != 0).any(dim=0).flatten(1).any(1) for row in rows])


def blocks(outputs: int, inputs: int, groups: int, interleaved: bool = False) -> Tensor:
    """Boolean [outputs, inputs]: what the definition of groups says, contiguous or dealt out in turns."""
    of_output = torch.arange(outputs) // (outputs // groups)
    channels = torch.arange(inputs)
    of_input = channels % groups if interleaved else channels // (inputs // groups)
    return of_output[:, None] == of_input[None, :]


def counted(found: Tensor) -> dict:
    """A matrix in numbers, and in at most ``BINS`` x ``BINS`` shares for drawing."""
    return {
        "outputs": found.shape[0],
        "inputs": found.shape[1],
        "reached": int(found.sum()),
        "used": int(found.any(dim=0).sum()),
        "bins": binned(found),
    }


def binned(found: Tensor) -> list[list[float]]:
    """Share of reached pairs in each bin of as equal a number of channels as can be."""
    rows, columns = map(_bins, found.shape)
    parts = [part.tensor_split(columns, dim=1) for part in found.double().tensor_split(rows, dim=0)]
    return [[float(block.mean()) for block in line] for line in parts]


def _bins(size: int) -> int:
    """As many as divide the channels evenly, so that no bin lies across a border between groups."""
    even = max(n for n in range(1, min(size, BINS) + 1) if size % n == 0)
    return even if even > BINS // 4 else min(size, BINS)


def layer_reach(
    layer: nn.Module, image: Iterable[int], patterns: Mapping[str, Tensor], device: torch.device
) -> dict:
    """One layer on a random image: its matrix, and the share of all inputs that some output depends on.

    Args:
        image: height and width, pixels; at least a kernel.
        patterns: name -> boolean [outputs, inputs]; under each name the number of pairs that are otherwise.
    """
    layer, inputs = layer.to(device), next(iter(patterns.values())).shape[1]
    x = torch.randn(1, inputs, *image).to(device).requires_grad_()
    outputs = layer(x)
    found = reach(outputs, x).cpu()
    (gradient,) = torch.autograd.grad((outputs * torch.randn(outputs.shape).to(outputs)).sum(), x)
    otherwise = {name: int((found != pattern).sum()) for name, pattern in patterns.items()}
    return counted(found) | otherwise | {"entries": _share(gradient != 0)}


def linearised(net: GroupedNet) -> GroupedNet:
    """A copy without kinks: no ReLU, means in place of maxima, so that only what is connected counts."""
    twin = copy.deepcopy(net)
    twin.relu, twin.pool = nn.Identity(), nn.AvgPool2d(3, stride=2)
    return twin


def through_convs(net: GroupedNet, device: torch.device) -> dict[str, dict]:
    """From each channel of conv1 to the outputs of the later convs, without kinks: conv name -> matrix."""
    net, names, found = linearised(net).to(device), list(net.conv)[1:], {}
    x = torch.randn(1, net.conv[names[0]].in_channels, *IMAGE).to(device).requires_grad_()
    for depth, name in enumerate(names, start=1):
        found[name] = counted(reach(net.through(x, names[:depth]), x))
    return found


def to_scores(net: GroupedNet, puzzles: Tensor) -> dict:
    """From each channel of conv1, as conv2 reads it, to each class score, without kinks."""
    net, names = linearised(net), list(net.conv)
    x = net.through(puzzles.flatten(0, 1), names[:1]).detach().requires_grad_()
    scores = net.scores(net.through(x, names[1:]))
    return counted(reach(scores, x))


def used_inputs(net: GroupedNet, puzzles: Tensor) -> dict[str, dict[str, float]]:
    """Shares of what each conv reads (the first: pixels) and gives that the class scores depend on.

    conv name -> "channels" and "entries" that it reads, "outputs": entries that it gives, before the ReLU; by
    the nonzero gradients of a random sum of the scores.
    """
    read: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}

    def keep(conv: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name = names[conv]
        read[name], given[name] = inputs[0], output

    names = {conv: name for name, conv in net.conv.items()}
    hooks = [conv.register_forward_hook(keep) for conv in names]
    scores = net(puzzles.detach().requires_grad_())
    for hook in hooks:
        hook.remove()
    total = (scores * torch.randn(scores.shape).to(scores)).sum()
    used = [g != 0 for g in torch.autograd.grad(total, [*read.values(), *given.values()])]
    return {
        name: {
            "channels": _share(x.any(dim=0).flatten(1).any(1)),
            "entries": _share(x),
            "outputs": _share(y),
        }
        for name, x, y in zip(read, used[: len(read)], used[len(read) :], strict=True)
    }


def _share(used: Tensor) -> float:
    return float(used.double().mean())
