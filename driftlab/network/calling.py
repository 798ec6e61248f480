"""Handling a network: how it is copied, and called: batch, dtype, mode, random state, outputs."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, GeneratorType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.blame import theirs
from driftlab.network.compiled import backends, carry_compiled
from driftlab.process import put_back
from driftlab.refusing import told
from driftlab.words import DiagnoseError


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, hooks on its parameters' gradients included; nothing of it is the network's own.

    Raises:
        DiagnoseError: the network cannot be copied, or what it gives for a copy is tied to itself.
    """
    with told(f"{type(module).__name__} cannot be copied"):
        known = _script_copies(module) | backends(module) | _begun_generators(module)
        try:
            twin = theirs(copy.deepcopy, module, dict(known))
        except RuntimeError:  # torch copies no tensor that was computed
            twin = theirs(copy.deepcopy, module, known | _computed(module))
        if not isinstance(twin, nn.Module):
            raise DiagnoseError(
                f"{type(module).__name__} cannot be copied: its deep copy is a {type(twin).__name__}: mend "
                "its __deepcopy__"
            )
        _refuse_ties(module, twin)
        carry_compiled(module, twin)
        for own, new in zip(module.parameters(), twin.parameters(), strict=True):
            carry_hooks(own, new)
    return twin


def _begun_generators(module: nn.Module) -> dict[int, Iterator]:
    """In place of what a call has gone through and left behind: one that says so if it is gone on with."""
    kept = (value for part in module.modules() for value in vars(part).values())
    return {id(value): _begun() for value in kept if isinstance(value, GeneratorType)}


def _begun() -> Iterator:
    raise RuntimeError(
        "it goes on with a generator that an earlier call has begun, of which there is no copy: make it in "
        "the call that uses it"
    )
    yield


def _computed(module: nn.Module) -> dict[int, Tensor]:
    """Values in place of what a network has computed and keeps: an old ``weight_norm``'s or a pruned weight,
    a cache. Hooks compute it anew at the next call."""
    kept = [t for part in module.modules() for t in tensors_in(vars(part))]
    return {id(t): t.data.clone() for t in kept if not _is_leaf(t)}


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # one of several views of a weight that an optimizer has written into since
        return False


def _refuse_ties(module: nn.Module, twin: nn.Module) -> None:
    """A ``__deepcopy__`` of its own may hand out the network itself, which would then be trained."""
    mine, others = ([*m.modules(), *m.parameters(), *m.buffers()] for m in (module, twin))
    own = {id(part) for part in mine} | {at for part in mine if (at := _memory(part))}
    if any(id(part) in own or _memory(part) in own for part in others):
        raise DiagnoseError(
            f"{type(module).__name__} cannot be copied: its deep copy shares modules or tensors with it, so "
            "that a training would change both: mend its __deepcopy__"
        )


def _memory(part: nn.Module | Tensor) -> int:
    """Where a plain tensor's numbers lie; 0 of anything else, which no two need share."""
    if type(part) not in (Tensor, nn.Parameter) or part.layout is not torch.strided:
        return 0
    return part.untyped_storage().data_ptr()


def _script_copies(module: nn.Module) -> dict[int, nn.Module]:
    """TorchScript's own deep copies have parameters that no optimizer takes; stored ones are right."""
    copies: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule) and id(part) not in inside:
            inside |= {id(m) for m in part.modules()}
            stored = io.BytesIO()
            torch.jit.save(part, stored)
            stored.seek(0)
            copies[id(part)] = torch.jit.load(stored)
    return copies


def carry_hooks(mine: Tensor, theirs: Tensor) -> None:
    """Register on ``theirs`` what is registered on ``mine`` and not on it."""
    after = theirs.register_post_accumulate_grad_hook
    for kind, register in (("_backward_hooks", theirs.register_hook), ("_post_accumulate_grad_hooks", after)):
        own = getattr(mine, kind, None)
        for hook in own.values() if own and not getattr(theirs, kind, None) else ():
            register(hook)


Call = Callable[[nn.Module, object], object]


def whole(module: nn.Module, inputs: object) -> object:
    return module(inputs)


def unpacked(module: nn.Module, inputs: object) -> object:
    return module(*inputs)


def by_keyword(module: nn.Module, inputs: Mapping) -> object:
    return module(**inputs)


def calling(module: nn.Module, inputs: object) -> Call:
    """How ``module`` is to be called on ``inputs``, by the signature of its ``forward``.

    A tensor is handed over as it is. A dict becomes keywords where ``forward`` has parameters of those
    names, a tuple or list becomes arguments where ``forward`` takes that many; else each is handed over
    whole.
    """
    if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping | tuple | list):
        return whole
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # no Python function: a compiled module
        return by_keyword if isinstance(inputs, Mapping) else unpacked
    kinds = {p.kind for p in parameters}
    if isinstance(inputs, Mapping):
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        fits = set(inputs) <= named or inspect.Parameter.VAR_KEYWORD in kinds
        return by_keyword if fits else whole
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return unpacked if len(positional) >= len(inputs) or inspect.Parameter.VAR_POSITIONAL in kinds else whole


T = TypeVar("T")


def each_tensor(change: Callable[[Tensor], Tensor], values: T) -> T:
    """``values`` with every tensor changed; one that stands there twice stays one: ``attention(x, x, x)``.

    So it has one gradient, the sum of those of its places, and what writes into it is seen in all of them.
    """
    made: dict[int, Tensor] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    return pytree.tree_map_only(Tensor, changed, values)


def tensors_in(values: object) -> list[Tensor]:
    """In whatever lists, tuples and dicts hold, each as often as it stands there."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def cast(inputs: object, dtype: torch.dtype) -> object:
    """The floating tensors of a batch (tensor, tuple, list or dict) in ``dtype``; the rest as it is."""
    return each_tensor(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def own_batch(inputs: object, dtype: torch.dtype) -> object:
    """As ``cast``, in tensors of its own: a network may write into its batch before the next arm sees it."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    return each_tensor(own, inputs)


@contextmanager
def evaluation_mode(module: nn.Module):
    """Eval mode and no gradients inside; every submodule's own mode as it was afterwards."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training


def seed_random_layers(seed: int) -> None:
    """The same random state before each run, and the same settings, whatever the last network changed.

    As ``torch.manual_seed``, which keeps a stack trace a call for a GPU that nobody has started.
    """
    put_back()
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def random_state() -> bytes:
    """Of the generators that ``seed_random_layers`` seeds. The host holds it: no device is waited for."""
    started = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return b"".join(g.get_state().numpy().tobytes() for g in (torch.default_generator, *started))


def step_seed(seed: int, step: int) -> int:
    """Of the random layers at one step; of a step of a window that has a step's seed for its own, too.

    torch's generator of a CPU reads the low 32 bits alone, so these hold both (Knuth's multiplicative hash).
    """
    low = (step + seed * 0x9E3779B1) % 2**32
    return ((seed << 32) + low) % 2**64  # more than that torch does not take


def named_leaves(outputs: object) -> dict[str, Tensor]:
    """The floating tensors in whatever a network returns, spelled as in code, in the order they come in.

    "" is a tensor that is returned by itself, "[1]" one of a tuple, "hidden_states[3]" and
    "past_key_values.layers[0].keys" lie in a dict or an object with fields. An object of any class is looked
    into, modules and functions apart.
    """
    found: dict[str, Tensor] = {}
    _collect(outputs, "", found, set())
    return found


def in_list(number: int, name: str) -> str:
    """How a leaf is spelled where what it lies in is one of a list."""
    return f"[{number}]{'.' * name[:1].isidentifier()}{name}"


def _collect(value: object, name: str, found: dict[str, Tensor], above: set[int]) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found[name] = value
    elif id(value) not in above:  # what holds itself has been looked into
        for key, part in _parts(value):
            _collect(part, f"{name}{key}" if name else key.removeprefix("."), found, above | {id(value)})


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """What a container holds, each with how it is written behind the container's name."""
    if isinstance(value, Mapping):
        return [(f".{k}" if isinstance(k, str) else f"[{k!r}]", value[k]) for k in value]
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        names = [f".{f}" for f in fields] if fields else [f"[{i}]" for i in range(len(value))]
        return list(zip(names, value, strict=True))
    if isinstance(value, nn.Module | type | FunctionType | partial):
        return ()
    if is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in fields_of(value)]
    return [(f".{k}", part) for k, part in getattr(value, "__dict__", {}).items()]
