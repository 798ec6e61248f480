"""The reference once more with one setting changed: does it then give what the candidate does?

Calls of torch are changed on their way, so it does not matter whether a layer of torch's or hand-written code
makes them: gelu in its other form, another epsilon, a mask one off. First in every call, then in one alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.passes import CannotRunError, Recorded, run
from driftlab.arithmetic.shadow import eager
from driftlab.mistakes.accused import Accused
from driftlab.mistakes.alterations import ALTERATIONS, Alteration
from driftlab.mistakes.torch_call import Call

# Runs of the reference at most, and elements that they may compute in all: some seconds on a CPU.
RUNS, ELEMENTS = 64, 1e8
# Of a call that is made more often than that, no single one is changed.
SINGLE_CALLS = 6


class _Altered(TorchFunctionMode):
    """Inside, calls of torch are changed: all of a kind, or the one numbered ``only``.

    Attributes:
        seen: the alteration's kinds of calls, with how many there were; elements: of all results.
    """

    def __init__(self, alterations: Iterable[Alteration], only: int | None = None, change: bool = True):
        super().__init__()
        self._alterations, self._only, self._change = list(alterations), only, change
        self.seen: Counter[str] = Counter()
        self.elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = Call(func, args, kwargs or {})
        for alteration in self._alterations:
            if not alteration.concerns(call):
                continue
            self.seen[alteration.words] += 1
            if self._change and self._only in (None, self.seen[alteration.words] - 1):
                return alteration.change(call)
        out = func(*args, **(kwargs or {}))
        self.elements += out.numel() if isinstance(out, Tensor) else 0
        return out


def what_ifs(a: Accused) -> Iterator[tuple[str, Tensor]]:
    """What the reference gives with a setting changed, and which; of those that its code comes by."""
    if a.difference.pass_ in ("input gradient", "weight gradient"):
        return  # the forward pass is right, so no setting of it is another
    census = _Altered(ALTERATIONS, change=False)
    if _result(a, census) is None:
        return
    for words, call in _other_labels(a.call):
        if (result := _result(replace(a, call=call), _Altered(()))) is not None:
            yield words, result
    runs = int(min(RUNS, ELEMENTS // max(1, census.elements)))
    for alteration, only in _trials(census.seen):
        if runs <= 0:
            return
        runs -= 1
        result = _result(a, _Altered([alteration.begun()], only))
        if result is not None:
            which = "" if only is None else f" in call {only + 1} of {census.seen[alteration.words]}"
            yield f"{alteration.words}{which}", result


def _other_labels(call: Recorded) -> Iterator[tuple[str, Recorded]]:
    """Calls with the labels of a sequence one position on, -100 ("ignore") where none is left."""

    def shifted(path: tuple, leaf: object) -> object:
        named = any("label" in str(getattr(key, "key", "")) for key in path)
        if not named or not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.is_floating_point():
            return leaf
        found.append(leaf)
        ignored = torch.full_like(leaf[:, :1], -100)
        return torch.cat([leaf[:, 1:], ignored], 1)

    found: list[Tensor] = []
    args, kwargs = pytree.tree_map_with_path(shifted, (call.args, call.kwargs))
    if found:
        yield "labels shifted once more", replace(call, args=args, kwargs=kwargs)


def _trials(seen: Counter[str]) -> Iterator[tuple[Alteration, int | None]]:
    known = [a for a in ALTERATIONS if seen[a.words]]
    yield from ((a, None) for a in known)
    yield from ((a, i) for a in known if 1 < seen[a.words] <= SINGLE_CALLS for i in range(seen[a.words]))


def _result(a: Accused, mode: _Altered) -> Tensor | None:
    call = a.call
    if a.difference.name != LOSS:  # then without a backward pass
        call = replace(call, gradients={}, loss=None)
    try:
        with eager(), mode:
            return a.quantity(run(a.reference, call, a.arithmetic, a.seed, a.difference.pass_ == "eval"))
    except CannotRunError:
        return None
