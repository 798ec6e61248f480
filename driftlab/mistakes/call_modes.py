"""Every call that a network makes of torch, on its way: to be looked at, or made otherwise."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlab.blame import caller
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.scopes import Scopes

# A call by its number, itself, and the floating values that were made before it; gives the result.
Change = Callable[[int, Call, Sequence[Tensor]], Any]
Key = tuple[int, int]  # the number of a call, the place of a tensor among its arguments
RESULT = -1  # in place of an argument's
_Container = list[Any] | dict[Any, Any]
Place = tuple[str, tuple[str, int, int]]  # a module, and the code in which it makes a call
_TELLS_NOTHING = ("get", "set", "size", "dim", "numel", "is_floating_point", "stride", "item", "detach")
# They are given tensors as places in a graph, where an alias has none.
_DIFFERENTIATES = ("grad", "backward")
_DETACHES = (Tensor.detach, torch.detach, Tensor.detach_, Tensor.data.__get__)


class Calls(TorchFunctionMode):
    """Every call that the network makes goes through ``change(number, call, earlier)``."""

    def __init__(self, scopes: Scopes, earlier: list[Tensor], change: Change):
        super().__init__()
        self._scopes, self._earlier, self._change, self._number = scopes, earlier, change, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        if not self._scopes.inside or call.name in _TELLS_NOTHING or call.writes:
            return call.run()
        self._number += 1
        out = self._change(self._number, call, self._earlier)
        self._earlier += floating(parts(out))
        return out


class Operands(TorchFunctionMode):
    """Every call takes, and gives, what ``see(key, function, tensor)`` makes of its floating tensors.

    Calls that write into what they are given, or differentiate by it, get the tensor itself.

    Args:
        calls: the numbers of those that are looked at; None of all.
    """

    def __init__(self, see: Callable[[Key, str, Tensor], Tensor], calls: Container[int] | None = None):
        super().__init__()
        self._see, self._calls, self._looked_at = see, 0, calls
        self._itself: dict[int, tuple[Tensor, Tensor]] = {}
        self._lent: list[list[_Container]] = []  # of the calls that are not over

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, tuple(args), kwargs or {})
        self._calls += 1
        if call.name in _DIFFERENTIATES:
            return call.with_tensors(lambda _, tensor: self._before_it_was_seen(tensor)).run()
        if call.writes or self._is_passed_by():
            return call.run()
        out = self._seen(call, call.name).run()
        return self._of(RESULT, call.name, out) if isinstance(out, Tensor) else out

    def handed_on(self, module: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same for a call of a module, by its name, which may take something out of lists and tables."""
        self._calls += 1
        if self._is_passed_by():
            self._lent.append([])
            return args, kwargs
        with torch._C.DisableTorchFunction():
            seen = self._seen(Call(nn.Module, args, kwargs), module)
        self._lent.append(lent := list[_Container]())
        named = {name: _put_into(own, seen.kwargs[name], lent) for name, own in kwargs.items()}
        return _put_into(args, seen.args, lent), named

    def handed_back(self) -> None:
        """After that call: what it left in them is its caller's again."""
        for own in self._lent.pop():
            for key in _keys(own):
                if (kept := self._itself.get(id(own[key]))) is not None:
                    own[key] = kept[1]

    def _is_passed_by(self) -> bool:
        return self._looked_at is not None and self._calls not in self._looked_at

    def _seen(self, call: Call, function: str) -> Call:
        """One that stands there twice stays one: some code asks whether its query is its key."""
        made: dict[int, Tensor] = {}

        def seen(place: int, tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = self._of(place, function, tensor)
            return made[id(tensor)]

        return call.with_tensors(seen)

    def _of(self, place: int, function: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        seen = self._see((self._calls, place), function, tensor)
        self._itself[id(seen)] = seen, tensor
        return seen

    def _before_it_was_seen(self, tensor: Tensor) -> Tensor:
        while tensor is not (before := self._itself.get(id(tensor), (tensor, tensor))[1]):
            tensor = before
        return tensor


def _put_into(own: Any, seen: Any, lent: list[_Container]) -> Any:
    """What is seen, in the lists and tables that were given."""
    if type(own) is tuple:
        return tuple(_put_into(one, other, lent) for one, other in zip(own, seen, strict=True))
    if type(own) in (list, dict):
        for key in _keys(own):
            own[key] = _put_into(own[key], seen[key], lent)
        lent.append(own)
        return own
    return seen


def _keys(container: _Container) -> list[Any]:
    return [*(range(len(container)) if isinstance(container, list) else container)]


class InPlaces(TorchFunctionMode):
    """Some calls are made otherwise in the places ``changed``.

    Attributes:
        places: where there are such calls, in their order, and whether what they take are weights themselves.
    """

    def __init__(self, now: Scopes, changed: frozenset[Place] = frozenset()):
        super().__init__()
        self._now, self._changed = now, changed
        self.places: dict[Place, bool] = {}

    def changes(self, of_weight: bool = False) -> bool:
        """Of one of these calls, which is noted: whether it is in a place that is changed."""
        place = self._now.now, caller()
        self.places[place] = self.places.get(place, True) and of_weight
        return place in self._changed


class Undetached(InPlaces):
    """Nothing is detached there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not _detaches(func, args) or not self.changes(isinstance(args[0], nn.Parameter)):
            return func(*args, **(kwargs or {}))
        return args[0] if isinstance(args[0], Tensor) else None


class WithoutGraph(InPlaces):
    """Gradients that are asked for there on the way are constants."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        graph = func is torch.autograd.grad and any(t.requires_grad for t in parts(out))
        return tuple(t if t is None else t.detach() for t in out) if graph and self.changes() else out


def _detaches(func: Callable, args: tuple) -> bool:
    if func in (torch._C._set_grad_enabled, torch.set_grad_enabled):
        return args[0] is False and torch.is_grad_enabled()
    if func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):
        return args[0].requires_grad and args[1:] == (False,)
    return func in _DETACHES and args[0].requires_grad


def floating(values: Sequence) -> list[Tensor]:
    return [t for t in values if isinstance(t, Tensor) and t.is_floating_point()]


def parts(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for t in values if isinstance(t, Tensor)] if isinstance(values, tuple | list) else []
