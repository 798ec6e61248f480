"""What the rewrites share: choosing convs, putting modules in their place, the fold back to the original."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RewriteError(ValueError):
    """A rewrite that cannot be made as asked; the message is one line: what, where, what to write instead."""


class Join(NamedTuple):
    """A tensor of the original as pieces of the rewritten one, end to end along dim, with sizes[i] each."""

    dim: int
    sources: tuple[str, ...]
    sizes: tuple[int, ...]

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        given = next(tensors[source] for source in self.sources if source in tensors)
        if len(self.sources) == 1:
            return given
        # A piece that never got a gradient has no entry: its gradient is zero.
        shapes = [[*given.shape[: self.dim], n, *given.shape[self.dim + 1 :]] for n in self.sizes]
        pieces = [
            tensors[source] if source in tensors else given.new_zeros(shape)
            for source, shape in zip(self.sources, shapes, strict=True)
        ]
        return torch.cat(pieces, dim=self.dim)


def joins_of_inner(conv: nn.Conv2d) -> dict[str, Join]:
    """Of a module that holds a conv like this one as ``conv``, with the same weight and bias."""
    return {leaf: Join(0, (f"conv.{leaf}",), (conv.out_channels,)) for leaf, _ in conv.named_parameters()}


Joins = Mapping[str, Join]
RewriteConv = Callable[[nn.Conv2d, str], tuple[nn.Module, Joins]]


class Fold:
    """From a rewritten model's tensors, by name, to the original's names and shapes: what ``model.fold`` is.

    Serves weights, gradients, buffers and momentum alike. Names that no rewrite touched pass through. Where
    only some pieces of a tensor are given, the others count as zero; where none is, it is left out.
    """

    def __init__(self, joins: Joins, earlier: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None):
        self._joins = dict(joins)
        self._target = {source: target for target, join in joins.items() for source in join.sources}
        self._earlier = earlier

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        folded: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            target = self._target.get(name)
            if target is None:
                folded[name] = tensor
            elif target not in folded:
                folded[target] = self._joins[target](tensors)
        return self._earlier(folded) if self._earlier else folded


def swap_convs(model: nn.Module, rewrite_conv: RewriteConv, match: str | Iterable[str] | None) -> nn.Module:
    """Replace convs of ``model`` in place; returns the model, or what replaces it where it is itself a conv.

    A conv in several places of the module tree is replaced by one and the same module in all of them. Only a
    plain nn.Conv2d is replaced: no subclass, no parametrized, pruned, hooked or weight-sharing one. Where a
    pattern matches such a conv, that is an error; match=None passes over it. The result carries ``fold``,
    composed with the one that the model had from an earlier rewrite.

    Args:
        rewrite_conv: takes a conv and its name; gives the module to stand in its place and, for the conv's
            "weight" and "bias", the Join of that module's tensors. Raises RewriteError where it cannot.
        match: an fnmatch pattern on the dotted names, or several; None for every conv that can be rewritten.

    Raises:
        RewriteError: a pattern matches no conv, or one that cannot be rewritten; there is none to rewrite.
            The model is unchanged then.
    """
    if "fold" in model._modules:
        raise RewriteError("the model's submodule 'fold' stands where a rewrite leaves its map; rename it")
    places = _places(model)
    chosen = list(places) if match is None else _matching(places, match)
    swaps = _rewritten(model, {conv: places[conv] for conv in chosen}, rewrite_conv, skip=match is None)
    earlier, joins = getattr(model, "fold", None), {}
    for conv, (module, own_joins) in swaps.items():
        for name in places[conv]:
            joins |= {_under(name, leaf): _prefixed(join, name) for leaf, join in own_joins.items()}
            if name:
                model.set_submodule(name, module)
            else:
                model = module
    model.fold = Fold(joins, earlier)
    return model


def conv_like(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None, groups: int) -> nn.Conv2d:
    """A plain conv with the settings of ``conv`` and copies of weight [out, in / groups, kH, kW], bias [out].

    dtype, device, memory format, training flag and requires_grad (weight and bias each) are kept.
    """
    # Built on the meta device: an initialisation would draw random numbers, only to be thrown away.
    settings = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, groups, bias is not None)
    channels = weight.shape[1] * groups, weight.shape[0]
    part = nn.Conv2d(*channels, *settings, conv.padding_mode, device="meta")
    part.weight = nn.Parameter(_copy(weight, conv.weight), requires_grad=conv.weight.requires_grad)
    if bias is not None:
        part.bias = nn.Parameter(bias.detach().clone(), requires_grad=conv.bias.requires_grad)
    return part.train(conv.training)


def _copy(weight: Tensor, original: Tensor) -> Tensor:
    dense = original.is_contiguous() or not original.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.contiguous_format if dense else torch.channels_last
    return weight.detach().clone(memory_format=memory_format)


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _prefixed(join: Join, prefix: str) -> Join:
    return join._replace(sources=tuple(_under(prefix, source) for source in join.sources))


def _places(model: nn.Module) -> dict[nn.Conv2d, list[str]]:
    """Every Conv2d with all the names it has; "" is the model itself."""
    places: dict[nn.Conv2d, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Conv2d):
            places.setdefault(module, []).append(name)
    if not places:
        raise RewriteError(f"the model ({type(model).__name__}) has no nn.Conv2d to rewrite")
    return places


def _matching(places: Mapping[nn.Conv2d, list[str]], match: str | Iterable[str]) -> list[nn.Conv2d]:
    patterns = [match] if isinstance(match, str) else list(match)
    names = {name: conv for conv, all_names in places.items() for name in all_names}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or list(names)[:5]
            known = ", ".join(name or "'' (the model itself)" for name in near)
            raise RewriteError(f"match={pattern!r} names no nn.Conv2d; the model has, for example, {known}")
    if not patterns:
        raise RewriteError("match=[] names no conv; write a pattern, or leave match out for every conv")
    return list(dict.fromkeys(c for n, c in names.items() if any(fnmatchcase(n, p) for p in patterns)))


def _rewritten(
    model: nn.Module, places: Mapping[nn.Conv2d, list[str]], rewrite_conv: RewriteConv, skip: bool
) -> dict[nn.Conv2d, tuple[nn.Module, Joins]]:
    swaps: dict[nn.Conv2d, tuple[nn.Module, Joins]] = {}
    first_refusal: RewriteError | None = None
    for conv, names in places.items():
        name = names[0] or "the model itself"
        try:
            _refuse_unless_plain(conv, name, model)
            swaps[conv] = rewrite_conv(conv, name)
        except RewriteError as refusal:
            if not skip:
                raise
            first_refusal = first_refusal or refusal
    if first_refusal and not swaps:
        raise first_refusal
    return swaps


def _refuse_unless_plain(conv: nn.Conv2d, name: str, model: nn.Module) -> None:
    own = {leaf for leaf, _ in conv.named_parameters(recurse=False)}
    buffers = [leaf for leaf, _ in conv.named_buffers(recurse=False)]
    mine = {id(parameter) for parameter in conv.parameters()}
    others = ((n, p) for n, m in model.named_modules() if m is not conv for p in m.parameters(recurse=False))
    sharing = [other for other, parameter in others if id(parameter) in mine]
    if type(conv) is not nn.Conv2d:
        reason = f"is a {type(conv).__name__}, whose own behaviour would be lost"
    elif not own <= {"weight", "bias"} or "weight" not in own or buffers:
        reason = f"computes its weight from {', '.join([*sorted(own - {'weight', 'bias'}), *buffers])}"
    elif conv._forward_hooks or conv._forward_pre_hooks:
        reason = "has forward hooks, which would be lost"
    elif sharing:
        reason = f"shares its weight with {sharing[0]}, and the two would come apart"
    else:
        return
    raise RewriteError(f"{name} {reason}: only a plain nn.Conv2d is rewritten; leave it out of match")
