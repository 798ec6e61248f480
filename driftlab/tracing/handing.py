"""A value of the candidate's in the place of one that both have, for one of those alone that go on with it.

Path patching (Goldowsky-Dill et al., Localizing Model Behavior with Path Patching, 2023). What a norm makes
of the memory for one attention alone, or what stands for a score where it is reported and not where it is
used: put in whenever the reference has it, it would change more than the mistake does.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from driftlab.network.modules import lies_in
from driftlab.tracing.cone import before_the_loss
from driftlab.tracing.kept import Kept
from driftlab.tracing.trial import Trial, laid_out

# Values where a difference begins, and of the candidate's for each, at most; modules around one.
BEGUN, OFFERED, AROUND = 8, 12, 3

# The module that is given another value (None: one operation is); the operations, and what each takes.
_Taken = tuple[str | None, dict[int, int]]


def given_otherwise(own: Kept, others: Kept, trial: Trial) -> tuple[int, int, str | None] | None:
    """The reference's value, the candidate's, and the module that takes this in its place; None where none.

    No module where one operation takes it that joins the parts of a result.
    """
    before = before_the_loss(own.flow)
    for number in [n for n in own.begun if n in before][:BEGUN]:
        for source in own.flow.values[number].inputs:
            if source not in own.tensors or own.flow.values[source].weight:
                continue
            offered = _offered(others, own.tensors[source])
            for module, taken in _takers(own, number, source):
                for other in offered:
                    if any(
                        trial.gives_theirs({}, given) for given in _given(own, taken, others.tensors[other])
                    ):
                        return own.original[source], other, module
    return None


def _offered(others: Kept, like: Tensor) -> list[int]:
    """What the candidate goes on with where it parts, and what only it has; of the size of a value."""
    values = others.flow.values
    read = {i for n in others.begun for i in values[n].inputs if not values[i].weight}
    found = sorted(read | {n for n in others.offered if not others.shared[n]})
    return [n for n in found if n in others.tensors and others.tensors[n].numel() == like.numel()][:OFFERED]


def _takers(own: Kept, number: int, source: int) -> Iterator[_Taken]:
    """The operation that makes a value; all in its module that take that; those in the modules around it."""
    values, root = own.flow.values, own.original[source]
    alone = {values[number].made_by[0]: source}
    scope = values[number].scope
    if own.joins(number):
        yield None, alone
    before: dict[int, int] = {}
    for _ in range(AROUND):
        taken = {
            values[n].made_by[0]: i
            for i in own.tensors
            if own.original[i] == root and not lies_in(values[i].scope, scope)
            for n in own.taken_by(i)
            if values[n].made_by[0] and lies_in(values[n].scope, scope)
        }
        if taken and taken != before:
            yield scope, taken
        if not scope:
            return
        before, scope = taken, scope.rpartition(".")[0]


def _given(own: Kept, taken: dict[int, int], values: Tensor) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What these operations are given, as of ``Rewriter``; in each way in which it may lie."""
    for one in laid_out({i: (own.tensors[i], values) for i in taken.values()}):
        yield {operation: (own.tensors[i], one[i]) for operation, i in taken.items()}
