"""Where a rewrite puts each weight: run it once more on serial numbers for weights, and look for them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from driftlab.fold.layout import Layout, Rewrite, named_tensors
from driftlab.process import random_state_kept

# 0 and 1 are what a rewrite fills in of its own (new biases, BatchNorm's ones), so no tag is one of them.
FIRST_TAG = 2


def positions_by_tags(
    reference: nn.Module, rewrite: Rewrite, layout: Layout
) -> tuple[dict[str, Tensor], list[str]]:
    """The position in ``layout`` of every element of the reference's tensors, as far as tags show it.

    ``rewrite`` gets a deep copy; torch's random state is left as it was. Whatever it raises is passed on.

    Returns:
        name -> int64 positions in the tensor's shape, for the tensors whose every tag was found again, and
        the names of those that were found more than once (the first place counts).
    """
    tagged = copy.deepcopy(reference)
    tags = _tag(tagged)
    with random_state_kept():
        rewritten = named_tensors(rewrite(tagged))
    count = FIRST_TAG + sum(tag.numel() for tag in tags.values())
    known = {
        n: t
        for n, t in rewritten.tensors.items()
        if layout.shapes.get(n) == tuple(t.shape) and not t.is_complex()
    }
    where = torch.full((count,), layout.size)
    again = torch.zeros(count, dtype=torch.bool)
    # What is trained is the weight; a buffer with the same values is a copy of it. Of several buffers the one
    # beside the module's weight is its own: a teacher's statistics start as copies of the network's.
    trained = {n: t for n, t in known.items() if n in rewritten.parameters}
    buffers = {n: t for n, t in known.items() if n not in trained}
    for of_this_kind, near in ((trained, False), (buffers, True), (buffers, False)):
        found, places = _tags_in(of_this_kind, count, layout)
        if near:
            beside = _beside_a_weight(tags, where, layout, found, places)
            found, places = found[beside], places[beside]
        first = torch.full((count,), layout.size).scatter_reduce_(0, found, places, "amin")
        where = torch.where(where < layout.size, where, first)
        again[found[where[found] != places]] = True
    positions = {name: where[tag] for name, tag in tags.items()}
    placed = {name: where for name, where in positions.items() if bool((where < layout.size).all())}
    return placed, [name for name in placed if bool(again[tags[name]].any())]


def _beside_a_weight(
    tags: dict[str, Tensor], where: Tensor, layout: Layout, found: Tensor, places: Tensor
) -> Tensor:
    """Of each tag found whether the module it is found in holds a weight of the module that it is of, too."""
    modules = {name: number for number, name in enumerate({name.rpartition(".")[0] for name in tags})}
    module_of = torch.full_like(where, len(modules))
    for name, tag in tags.items():
        module_of[tag] = modules[name.rpartition(".")[0]]
    theirs = layout.modules()
    pairs = torch.zeros(len(modules) + 1, len(layout.shapes), dtype=torch.bool)
    placed = where < layout.size
    pairs[module_of[placed], theirs[layout.owners(where[placed])]] = True
    return pairs[module_of[found], theirs[layout.owners(places)]]


def _tag(module: nn.Module) -> dict[str, Tensor]:
    """Number all elements of ``module``, in place; returns the tags, int64 in each tensor's shape."""
    tensors = {n: t for n, t in named_tensors(module).tensors.items() if _can_hold_tags(t)}
    count = FIRST_TAG + sum(tensor.numel() for tensor in tensors.values())
    if any(t.is_floating_point() and count > 2 / torch.finfo(t.dtype).eps for t in tensors.values()):
        module.double()
        tensors = {name: tensor for name, tensor in named_tensors(module).tensors.items() if name in tensors}
    tags, start = {}, FIRST_TAG
    for name, tensor in tensors.items():
        tags[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        tensor.copy_(tags[name])
        start += tensor.numel()
    return tags


def _can_hold_tags(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64))


def _tags_in(tensors: dict[str, Tensor], count: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """All tags in rewritten tensors, and their positions."""
    found, places = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for name, tensor in tensors.items():
        values = tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()
        whole = values.to(torch.int64)
        is_tag = (whole >= FIRST_TAG) & (whole < count) & (whole.to(values.dtype) == values)
        found.append(whole[is_tag])
        places.append(layout.positions(name)[is_tag])
    return torch.cat(found), torch.cat(places)
