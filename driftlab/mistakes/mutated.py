"""The mutants of a call: what each operator makes of it, and how that is made again in another run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.call_modes import parts
from driftlab.mistakes.mutant import Mutant
from driftlab.mistakes.mutations import Operator, averaged, mutations, numbered
from driftlab.mistakes.pools import pooled_otherwise
from driftlab.mistakes.torch_call import Call

# Changed calls that are looked for among the candidate's values.
LOOKED_AT = 10_000
COUNTS = "the largest of the counts that are divided by for all"
# They write into two of their operands, which may be another's weight once operands are exchanged.
_MOVES_STATISTICS = ("batch_norm", "instance_norm")


class Mutated:
    """Of all calls together no more than ``LOOKED_AT``."""

    def __init__(self) -> None:
        self._looked_at = 0

    def of(
        self, here: Mutant, operators: Sequence[Operator], call: Call, earlier: Sequence[Tensor], out: Any
    ) -> Iterator[tuple[Mutant, Callable[[], Any], Any]]:
        """With what makes their results, and these: other numbers in the right one's shape.

        A last window more, or less, has its own.
        """
        own, moves = parts(out), call.writes or call.name in _MOVES_STATISTICS
        shapes = [t.shape for t in own]
        given = [t.detach().clone() for t in call.tensors] if call.name in _MOVES_STATISTICS else []
        with torch.no_grad():
            for operator in operators:
                alike: Counter[str] = Counter()
                for words, make in mutations(call, earlier, operator):
                    which, alike[words] = alike[words], alike[words] + 1
                    self._looked_at += 1
                    if self._looked_at > LOOKED_AT:
                        return
                    try:
                        made = make()
                    except Exception:  # it takes no such argument
                        continue
                    finally:
                        _put_back(call, given)
                    others = parts(made)
                    if operator is not pooled_otherwise and [t.shape for t in others] != shapes:
                        continue
                    if moves or not all(map(torch.equal, own, others)):
                        change = partial(_mutated, operator, words, which)
                        mutant = replace(here, words=words, kind=operator, change=change, which=which)
                        yield mutant, make, made


def _put_back(call: Call, given: Sequence[Tensor]) -> None:
    for tensor, values in zip(call.tensors, given, strict=False):
        if not torch.equal(tensor, values):  # of views that torch makes several of none may be written into
            tensor.copy_(values)


def with_another_number(here: Mutant, call: Call) -> Iterator[Mutant]:
    words = f"the number in `{call.name}`"
    for said, other in ((COUNTS, averaged), (words, numbered)):
        if other(call):
            yield replace(here, words=said, change=partial(_numbered, other))
            return


def _numbered(other: Callable, number: int, call: Call, earlier: Sequence[Tensor], times: float) -> Any:
    return other(call)(times)


def _mutated(
    operator: Operator,
    words: str,
    which: int,
    number: int,
    call: Call,
    earlier: Sequence[Tensor],
    times: float,
) -> Any:
    """``which`` of those that the operator calls so; another call on the same line may have others too."""
    alike = (make for said, make in mutations(call, earlier, operator) if said == words)
    return next(islice(alike, which, None), call.run)()
