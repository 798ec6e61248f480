"""Which module of the candidate stands for which of the reference, and whether it was rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

Sources = Callable[[str], frozenset[str]]


def paired_modules(reference: nn.Module, candidate: nn.Module, sources: Sources) -> dict[str, str]:
    """Names of the reference's modules -> those of the candidate's that hold the same tensors.

    A module with tensors is paired with the smallest one of the candidate that holds what the fold takes them
    from, and that holds nothing else of the fold's; one without tensors with its namesake, if the parents are
    namesakes too. The whole networks, "", are always paired.

    Args:
        sources: the candidate's tensors that a reference tensor is taken from.
    """
    mine, theirs = dict(reference.named_modules()), dict(candidate.named_modules())
    taken_from = {n: sources(n) for n in _tensor_names(reference)}
    pairs = {"": ""}
    alike = [n for n, _ in reference.named_modules()] == [n for n, _ in candidate.named_modules()]
    for name, module in mine.items():
        if not name:
            continue
        own = {n for n in taken_from if n.startswith(f"{name}.")}
        if alike or (name in theirs and own and not frozenset().union(*(taken_from[n] for n in own))):
            found = name
        elif own:
            found = _holder(name, own, taken_from, theirs)
        else:
            parent = name.rpartition(".")[0]
            found = (
                name if name in theirs and pairs.get(parent) == parent and not any(module.buffers()) else None
            )
        if found is not None:
            pairs[name] = found
    return pairs


def _tensor_names(module: nn.Module) -> list[str]:
    return [n for n, _ in module.named_parameters()] + [n for n, _ in module.named_buffers()]


def _holder(name: str, own: set[str], taken_from: dict[str, frozenset[str]], theirs: dict) -> str | None:
    needed = frozenset().union(*(taken_from[n] for n in own))
    if not needed:
        return None
    if name in theirs and all(n.startswith(f"{name}.") for n in needed):
        holder = name  # a namesake that holds them, and perhaps wraps a module of the old make
    else:
        holder = common_parent(needed)
    others = frozenset().union(*(s for n, s in taken_from.items() if n not in own))
    inside = {n for n in others if n.startswith(f"{holder}.")} if holder else others
    return holder if holder in theirs and not inside else None


def lies_in(inner: str, outer: str) -> bool:
    """Whether a module is ``outer``, or lies in it; "" is the network."""
    return not outer or f"{inner}.".startswith(f"{outer}.")


def common(modules: Iterable[str]) -> str:
    """The innermost module that is, or holds, each of them."""
    paths = [name.split(".") if name else [] for name in modules]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def common_parent(names: Iterable[str]) -> str:
    """The innermost module that holds all of these tensors."""
    return common(name.rpartition(".")[0] for name in names)


def evaluates_otherwise(module: nn.Module) -> bool:
    """Whether it is a layer of torch's that does something else in eval mode."""
    if isinstance(module, _NormBase):
        return module.running_mean is not None
    return isinstance(module, _DropoutNd)


def is_torchs(module: nn.Module) -> bool:
    """Whether it is a layer of torch's own without parts, which takes what it is given."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def only_holds(module: nn.Module) -> bool:
    """Whether it has no ``forward``, as a list or a dict of modules or parameters."""
    made = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    return made is vars(nn.Module)["forward"] and "forward" not in vars(module)


def calls_in_turn(module: nn.Module) -> bool:
    """Whether its code is that of a list of modules, of which each is given what the one before gave."""
    return type(module) is nn.Sequential


def called(network: nn.Module, module: str) -> str:
    """The module itself, or the one that calls what a list or a dict of modules holds."""
    while module and only_holds(network.get_submodule(module)):
        module = module.rpartition(".")[0]
    return module


def is_rewritten(mine: nn.Module, theirs: nn.Module) -> bool:
    """Whether the two may compute differently: another class, setting, hook or ``forward``, here or below."""
    parts, others = list(mine.named_modules()), list(theirs.named_modules())
    if [n for n, _ in parts] != [n for n, _ in others]:
        return True
    return any(_differs(a, b) for (_, a), (_, b) in zip(parts, others, strict=True))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What every module has, and what the networks' own state is told by elsewhere.
_OWN = {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
}


def _differs(a: nn.Module, b: nn.Module) -> bool:
    if type(a) is not type(b) or a.training != b.training:
        return True
    if any(len(getattr(a, h, ())) != len(getattr(b, h, ())) for h in _HOOKS):
        return True
    return _hooked(a) != _hooked(b) or _settings(a) != _settings(b)


def _hooked(module: nn.Module) -> list[int]:
    """How many hooks each of its own parameters has."""
    own = module.parameters(recurse=False)
    return [sum(len(getattr(p, h, None) or ()) for h in _WEIGHT_HOOKS) for p in own]


def _settings(module: nn.Module) -> dict[str, object]:
    """Its own attributes, as far as two of them can be compared: what is code by itself, the rest as text."""
    return {
        name: value if callable(value) else repr(value)
        for name, value in vars(module).items()
        if name not in _OWN and "hooks" not in name and not isinstance(value, Tensor | nn.Module)
    }
