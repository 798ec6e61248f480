"""A value of the candidate's in the place of one that both have, for one of those alone that go on with it.

Path patching (Goldowsky-Dill et al., Localizing Model Behavior with Path Patching, 2023). What a norm makes
of the memory for one attention alone, or what stands for a score where it is reported and not where it is
used: put in whenever the reference has it, it would change more than the mistake does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from torch import Tensor

from driftlab.network.modules import lies_in
from driftlab.tracing.flow import in_steps, reached
from driftlab.tracing.joining import joined_in_one, nearest
from driftlab.tracing.kept import Kept
from driftlab.tracing.trial import Trial, laid_out

# Values where a difference begins, and of the candidate's for each, at most; modules around one; operations
# that a layer may be written in.
BEGUN, OFFERED, AROUND, STEPS = 8, 12, 3, 10

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
            for instead in _in_turns(own, others, source, other):
                given = _given(own, others, instead, module, taken)
                if any(trial.gives_theirs({}, one) for one in given):
                    return own.original[source], other, module and _within_reach(own, others, other, module)
    return None


def _within_reach(own: Kept, others: Kept, number: int, module: str) -> str:
    """The module, or that around it in which all is at hand that the candidate makes its value of."""
    values = own.flow.values
    made_of = [others.looks_like(n) for n in others.made_of[number] if not others.flow.values[n].weight]
    at_hand = [[values[n].scope for i in alike for n in (i, *own.users(i))] for alike in made_of if alike]
    while module and not all(any(lies_in(scope, module) for scope in scopes) for scopes in at_hand):
        module = module.rpartition(".")[0]
    return module


def _in_turns(own: Kept, others: Kept, source: int, other: int) -> Iterator[dict[int, int]]:
    """The one for the other, once; and whenever the two are made, where that is as often.

    What the reference has of what the candidate makes so was not mistaken.
    """
    yield {source: other}
    mistaken = ([n for n in theirs if not others.shared[n]] for theirs in others.turns.again(other))
    again = [
        dict(zip(mine, theirs, strict=True))
        for mine, theirs in product(own.turns.again(source), mistaken)
        if len(mine) == len(theirs) > 1 and (mine[0], theirs[0]) == (source, other)
    ]
    for instead in (one for at, one in enumerate(again) if one not in again[:at]):
        both = [(own.tensors[s], others.tensors[n]) for s, n in instead.items()]
        if all(one.numel() == value.numel() and value.dim() == both[0][1].dim() for one, value in both):
            yield instead


def fed_otherwise(
    own: Kept, others: Kept, trial: Trial, spots: Sequence[int], number: int, shared: bool = True
) -> int | None:
    """Of which of the candidate's values the module that makes these, in a call each, would make ``number``.

    Of one value alone, so that its own work may be right; ``shared``: of one that both networks have.
    """
    module, sources = own.flow.values[spots[0]].scope, [only_source(own, spot) for spot in spots]
    if not all(source in own.tensors and (own.shared[source] or not shared) for source in sources):
        return None
    mine = joined_in_one(own, sources)
    taken = {
        n: i for source in sources for n, i in next(_in_modules(own, module, source), ("", {}))[1].items()
    }
    if mine is None or not taken:
        return None
    for other in islice(_steps_before(others, number, mine.tensor.numel()), OFFERED):
        parts = mine.parts(own, nearest(mine.tensor, others.tensors[other]))
        given = {n: (own.tensors[i], parts[own.original[i]]) for n, i in taken.items()}
        if trial.gives_theirs({}, given):
            return other
    return None


def only_source(own: Kept, spot: int) -> int:
    """The one value besides weights that the module that makes ``spot`` makes it of; -1 of several."""
    values, module = own.flow.values, own.flow.values[spot].scope
    inside = reached([spot], lambda at: [i for i in values[at].inputs if values[i].scope == module])
    outside = {own.original[i] for n in inside for i in values[n].inputs if not values[i].weight} - inside
    return outside.pop() if len(outside) == 1 else -1


def _steps_before(others: Kept, number: int, size: int) -> Iterator[int]:
    """What a value is made of by a few operations, of that size; the last first."""
    for made in in_steps(number, lambda n: others.flow.values[n].inputs, STEPS):
        yield from (
            n for n in sorted(made & others.tensors.keys(), reverse=True) if others.tensors[n].numel() == size
        )


def _offered(others: Kept) -> list[int]:
    """What the candidate goes on with where it parts, be it joined to others, and what only it has."""
    values = others.flow.values
    read = {i for n in others.begun for i in values[n].inputs if not values[i].weight}
    read |= {i for n in read for i in others.joined_of(n)}
    found = read | {n for n in others.offered if not others.shared[n]}
    return [n for n in sorted(found) if n in others.tensors]


def _takers(own: Kept) -> Iterator[tuple[int, str | None, _Taken]]:
    """What the first values are made of that the candidate has not, and who takes it: all in the module that
    makes the value, and in those around it. Of a joined result the operation that joins it comes first."""
    values, before = own.flow.values, own.flow.before_the_loss()
    for number in [n for n in own.begun if n in before][:BEGUN]:
        for source in values[number].inputs:
            if source not in own.tensors or values[source].weight or not own.shared[source]:
                continue  # what the candidate has not was mistaken before
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


def _given(
    own: Kept, others: Kept, instead: Mapping[int, int], module: str | None, taken: _Taken
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What these operations are given, as of ``Rewriter``, in each way in which it may lie.

    And those of the module that take a later one.

    Args:
        instead: the candidate's values for the reference's, of which the first is taken.
    """
    (_, first), *later = instead.items()
    values = dict.fromkeys(taken.values(), others.tensors[first])
    for source, other in later:
        more = next(_in_modules(own, module or "", source), ("", {}))[1]
        taken, values = taken | more, values | dict.fromkeys(more.values(), others.tensors[other])
    for one in laid_out({i: (own.tensors[i], value) for i, value in values.items()}):
        yield {operation: (own.tensors[i], one[i]) for operation, i in taken.items()}
