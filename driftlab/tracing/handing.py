"""A value of the candidate's in the place of one that both have, for one of those alone that go on with it.

Path patching (Goldowsky-Dill et al., Localizing Model Behavior with Path Patching, 2023). What a norm makes
of the memory for one attention alone, or what stands for a score where it is reported and not where it is
used: put in whenever the reference has it, it would change more than the mistake does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from driftlab.network.modules import lies_in
from driftlab.tracing.kept import Kept
from driftlab.tracing.trial import Trial, laid_out

# Values where a difference begins, and of the candidate's for each, at most; modules around one.
BEGUN, OFFERED, AROUND = 8, 12, 3

# Operations by their numbers, and what each takes.
_Taken = dict[int, int]


def given_otherwise(own: Kept, others: Kept, trial: Trial) -> tuple[int, int, str | None] | None:
    """The reference's value, the candidate's, and the module that takes this in its place; None where none.

    No module where one operation takes it that joins the parts of a result.
    """
    offered = _offered(others)
    for source, module, taken in _takers(own):
        alike = (n for n in offered if others.tensors[n].numel() == own.tensors[source].numel())
        for other in islice(alike, OFFERED):
            if any(trial.gives_theirs({}, given) for given in _given(own, taken, others.tensors[other])):
                return own.original[source], other, module
    return None


def _offered(others: Kept) -> list[int]:
    """What the candidate goes on with where it parts, and what only it has."""
    values = others.flow.values
    read = {i for n in others.begun for i in values[n].inputs if not values[i].weight}
    found = read | {n for n in others.offered if not others.shared[n]}
    return [n for n in sorted(found) if n in others.tensors]


def _takers(own: Kept) -> Iterator[tuple[int, str | None, _Taken]]:
    """What the first values are made of that the candidate has not, and who takes it: all in the module that
    makes the value, and in those around it. Of a joined result the operation that joins it comes first."""
    values, before = own.flow.values, own.flow.before_the_loss()
    for number in [n for n in own.begun if n in before][:BEGUN]:
        for source in values[number].inputs:
            if source not in own.tensors or values[source].weight:
                continue
            if own.joins(number):
                yield source, None, {values[number].made_by[0]: source}
            for module, taken in _in_modules(own, values[number].scope, source):
                yield source, module, taken


def _in_modules(own: Kept, module: str, source: int) -> Iterator[tuple[str, _Taken]]:
    """The operations in a module, and in those around it, that take a value from outside; no two alike."""
    values, before = own.flow.values, {}
    copies = [i for i in own.tensors if own.original[i] == own.original[source]]
    for _ in range(AROUND):
        outside = (i for i in copies if not lies_in(values[i].scope, module))
        uses = ((n, i) for i in outside for n in own.uses[i])
        taken = {
            values[n].made_by[0]: i
            for n, i in uses
            if values[n].made_by[0] and lies_in(values[n].scope, module)
        }
        if taken and taken != before:
            yield module, taken
        before, module = taken, module.rpartition(".")[0]


def _given(own: Kept, taken: _Taken, values: Tensor) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What these operations are given, as of ``Rewriter``; in each way in which it may lie."""
    for one in laid_out({i: (own.tensors[i], values) for i in taken.values()}):
        yield {operation: (own.tensors[i], one[i]) for operation, i in taken.items()}
