"""The flow of values through a network: each tensor made on the way, in which module, of which others.

Operations are seen where torch dispatches them, so that what a module computes by itself, between its parts,
has its place as well as what its parts compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.shadow import held
from driftlab.network.calling import tensors_in
from driftlab.network.compiled import DispatchMode
from driftlab.tracing.prints import Prints, Seen, prints
from driftlab.tracing.rewriting import all_made, written_by
from driftlab.tracing.scopes import Scopes

Made = tuple[int, str, int]


@dataclass(frozen=True)
class Value:
    """One tensor that was made.

    Attributes:
        scope: the innermost module in which it was made, "" the network itself.
        inputs: the values that it was made of, by their number.
        prints: None where it holds no floating number.
        fed: whether weights or the batch went into it; what is made of constants alone may be held otherwise.
        given: a weight, what is made of weights alone, or the batch: the two have that in common.
        weight: a weight, or what is made of weights alone.
        made_by: the number of the operation, torch's name of it, and the place among its results.
        sent_back: whether it was made on a way back within the pass, as forces are, and follows what is
            computed and how.
    """

    scope: str
    inputs: tuple[int, ...] = ()
    prints: Prints | None = None
    fed: bool = True
    given: bool = False
    weight: bool = False
    made_by: Made = (0, "", 0)
    sent_back: bool = False

    @property
    def size(self) -> int:
        """How many numbers it holds; 0 where these are not floating."""
        return self.prints.whole[0] if self.prints is not None else 0

    @property
    def part(self) -> bool:
        """Whether it was taken out of a larger tensor as it is."""
        return self.made_by[1] in TAKES_PART


# Operations that give some of the numbers that they are given, where these lie.
SHOWS_PART = ("select", "slice", "split", "split_with_sizes", "unbind", "narrow", "diagonal")
# And copies of them.
TAKES_PART = (*SHOWS_PART, "unsafe_split", "index", "index_select", "gather")


@dataclass
class Flow:
    """All values of one pass, in the order in which they were made.

    Attributes:
        results: what it was run for, by name: the numbers of the values.
        ends: the same, the tensors themselves, of a forward pass.
    """

    values: list[Value] = field(default_factory=list)
    results: dict[str, int] = field(default_factory=dict)
    ends: dict[str, Tensor] = field(default_factory=dict)

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def seen(self) -> Seen:
        """Of what leads to the results: what is made and dropped again nobody goes on with."""
        seen, leading = Seen(), self.leading()
        for number, value in enumerate(self.values):
            if number in leading or value.given:  # of a table's rows any lookup could be made
                seen.add(value.prints, number, whole=value.weight)
        return seen

    def leading(self) -> set[int]:
        """What leads to the results."""
        return reached(self.results.values(), lambda at: self.values[at].inputs)

    def uses(self) -> list[list[int]]:
        """Of each value, those that were made of it."""
        return uses_of([value.inputs for value in self.values])

    def before_the_loss(self) -> range:
        """The values up to the last output: no border is moved into a loss, which damps whatever is wrong."""
        last = max((number for end, number in self.results.items() if end != LOSS), default=None)
        return range(len(self.values) if last is None else last + 1)


def uses_of(inputs: Sequence[Iterable[int]]) -> list[list[int]]:
    """Of each value, the numbers of those that were made of it; by what each was made of."""
    found: list[list[int]] = [[] for _ in inputs]
    for number, made_of in enumerate(inputs):
        for i in made_of:
            found[i].append(number)
    return found


def reached(begin: Iterable[int], onward: Callable[[int], Iterable[int]]) -> set[int]:
    """The values that one comes by from these, themselves included."""
    found, waiting = set(), list(begin)
    while waiting:
        if (at := waiting.pop()) not in found:
            found.add(at)
            waiting += onward(at)
    return found


def in_steps(begin: int, onward: Callable[[int], Iterable[int]], steps: int) -> Iterator[set[int]]:
    """The values that one comes by from one in one step, in two, and so on; each once."""
    last, seen = {begin}, {begin}
    for _ in range(steps):
        last = {n for at in last for n in onward(at)} - seen
        seen |= last
        yield last


class Recorder(DispatchMode):
    """Every operation inside, into ``flow``.

    Args:
        change: of a value by its number, once it was made: it may look at it, or write into it.
        printed: the numbers of the values whose prints are taken, which takes most of the time; None of all.
        look: takes them.
    """

    def __init__(
        self,
        scopes: Scopes,
        change: Callable[[int, Value, Tensor], None] | None = None,
        printed: Container[int] | None = None,
        look: Callable[[Tensor], Prints | None] = prints,
    ):
        super().__init__()
        self.flow, self._scopes, self._change, self._operations = Flow(), scopes, change, 0
        self._printed, self._look = printed, look
        self._made: dict[int, tuple[weakref.ref, int]] = {}
        self._weights: set[int] = set()
        self._written: dict[int, list[int]] = {}  # by the memory that was written into

    def given(self, weights: Iterable[Tensor], batch: Iterable[Tensor]) -> None:
        for tensor, weight in (*((w, True) for w in weights), *((b, False) for b in batch)):
            fed = tensor.is_floating_point()
            self._keep(tensor, Value("", prints=self._prints(tensor), fed=fed, given=True, weight=weight))
        self._weights = {self.number(tensor) for tensor in weights}

    def number(self, tensor: Tensor) -> int:
        """Of the value that a tensor holds now."""
        ref, number = self._made.get(id(tensor), (None, None))
        if ref is None or ref() is not tensor:  # a constant, from outside of what is seen
            number = self._keep(tensor, Value("", prints=self._prints(tensor), fed=False, given=True))
        later = [w for w in self._written.get(_memory(tensor), ()) if w > number]
        return self._keep(tensor, self._value((number, *later), tensor)) if later else number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read = tensors_in((args, kwargs))
        # what is only as large as another tensor is not made of its values
        inputs = () if _is_new(func) else tuple(dict.fromkeys(self.number(t) for t in read))
        out = func(*args, **kwargs)
        self._operations += 1
        changed = written_by(func, args, kwargs)
        for place, tensor in enumerate(all_made(changed, out)):
            number = self._keep(tensor, self._value(inputs, tensor, (self._operations, func._opname, place)))
            if place < len(changed):
                self._written.setdefault(_memory(tensor), []).append(number)
        return out

    def _value(self, inputs: tuple[int, ...], tensor: Tensor, made_by: Made = (0, "", 0)) -> Value:
        fed = any(self.flow.values[i].fed for i in inputs)
        weight = bool(inputs) and self._weights.issuperset(inputs)
        back = torch._C._current_graph_task_id() != -1
        return Value(self._scopes.now, inputs, self._prints(tensor), fed, weight, weight, made_by, back)

    def _prints(self, tensor: Tensor) -> Prints | None:
        """Of the value that is made next."""
        wanted = self._printed is None or len(self.flow.values) in self._printed
        return self._look(tensor) if wanted else None

    def _keep(self, tensor: Tensor, value: Value) -> int:
        number = self.flow.add(value)
        if self._change is not None:
            self._change(number, value, tensor)
        self._made[id(tensor)] = weakref.ref(tensor), number
        if value.given and value.inputs:
            self._weights.add(number)
        return number


def _memory(tensor: Tensor) -> int:
    """Where its numbers lie; of other kinds of tensors nobody knows, and no two share it."""
    inner = held(tensor)
    plain = type(inner) in (Tensor, nn.Parameter) and inner.layout is torch.strided and not inner.is_nested
    return inner.untyped_storage().data_ptr() if plain else id(tensor)


def _is_new(func: Callable) -> bool:
    name = func._opname
    return name.endswith("_like") or name.startswith("new_")
