"""What leads to one network's results and is never come by in the other, and where that begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from driftlab.network.modules import common, lies_in
from driftlab.tracing.beside import Beside
from driftlab.tracing.flow import Flow, reached
from driftlab.tracing.prints import ABOUT


class Cone:
    """The absent values that lead to ``ends`` of a flow, gone up from them through absent ones alone.

    Args:
        own, other: the flows of the two networks; a value is absent that ``other`` has nowhere.
        ends: results of ``own`` that are wrong, by name.
        right: whether a module is known to be right by itself.
        within: how far from the prints of each value those of the same value may be, relative.

    Attributes:
        first: those that are made of values that are there. Where they begin in several of the network's own
            parts, as in two towers, or in several modules of one list, those of the one that comes first.
    """

    def __init__(
        self,
        own: Flow,
        other: Flow,
        ends: Iterable[str],
        right: Callable[[str], bool],
        within: Sequence[float],
    ):
        self._values, self._uses = own.values, own.uses()
        self._there = Beside(own, other, within)
        self._ends = set(own.results.values())
        self._right = right
        self._any_known = any(map(right, {value.scope for value in self._values} - {""}))
        self._before_the_loss = own.before_the_loss()
        self._absent = self._led([own.results[end] for end in ends if end in own.results])
        first = [n for n in sorted(self._absent) if self._absent.isdisjoint(self._values[n].inputs)]
        self._begun = [n for n in first if not self._there.made_up_for(n)] or first
        self.first = self._in_one_part(self._upstream(self._begun))

    def begun(self) -> dict[str, int]:
        """The modules in which it may begin, each with its first value there."""
        found: dict[str, int] = {}
        for number in self._begun:
            found.setdefault(self._lifted(number), number)
        return found

    def keep(self, scopes: Collection[str]) -> None:
        """It begins in these modules alone."""
        self._begun = [n for n in self._begun if self._lifted(n) in scopes]
        self.first = self._in_one_part(self._upstream(self._begun))

    def scope(self, cut: bool = False) -> str:
        """The innermost module that holds all of the beginning.

        Args:
            cut: whether the other does not go on there at all, as behind a ``detach``: that lies between who
                made the beginning and who goes on with it.
        """
        found = common([self._lifted(n) for n in self.first])
        if not self._any_known:
            made = common([self._lifted(n, moved=False) for n in self.first])
            found = made if lies_in(made, found) else found
        users = [self._values[u].scope for n in self.first for u in self._uses[n]] if cut else []
        return common([found, *users]) or found

    def gives_what_is_there(self, module: str) -> bool:
        """Whether the other has all that a module hands on, which is right then wherever its borders are."""
        values, inside = self._values, [lies_in(value.scope, module) for value in self._values]
        given = [
            n
            for n, within in enumerate(inside)
            if within
            and not values[n].given
            and (n in self._ends or not all(inside[u] for u in self._uses[n]))
        ]
        telling = any((own := values[n].prints) is not None and own.telling for n in given)
        return telling and all(map(self._there.has, given))

    def is_cut(self, other: Cone) -> bool:
        """Whether this network has what the other's beginning is made of, and goes nowhere from there."""
        there, beside = self._beside(other)
        return bool(there) and not beside

    def _upstream(self, numbers: list[int]) -> list[int]:
        """Less those in modules that what begins beside them leads to."""
        begun: dict[str, list[int]] = {}
        for number in numbers:
            begun.setdefault(self._lifted(number), []).append(number)
        led_to = {
            made
            for scope, own in begun.items()
            for at in self._leads_to(own)
            if not lies_in(made := self._values[at].scope, scope) and not lies_in(scope, made)
        }
        return [n for scope, own in begun.items() if scope not in led_to for n in own] or numbers

    def _leads_to(self, numbers: list[int]) -> set[int]:
        """The absent values that are made of these."""

        def made(number: int) -> list[int]:
            return [u for u in self._uses[number] if u in self._absent]

        return reached(chain.from_iterable(map(made, numbers)), made)

    def _in_one_part(self, numbers: list[int]) -> list[int]:
        scopes = [self._lifted(n) for n in numbers]
        shared = common(scopes)
        if shared in scopes or (shared and any(value.scope == shared for value in self._values)):
            return numbers
        depth = shared.count(".") + 1 if shared else 0
        parts = [scope.split(".")[depth] for scope in scopes]
        return [n for n, part in zip(numbers, parts, strict=True) if part == parts[0]]

    def scope_beside(self, other: Cone) -> str | None:
        """The module in which this network parts from the other, where that one begins to part from it.

        It is where what the other's beginning is made of goes another way, or is not gone on with at all.
        """
        there, beside = self._beside(other)
        if beside:
            return common([self._lifted(n) for n in beside])
        if there:
            return self._values[max(there)].scope
        return self.scope() if self.first else None

    def _beside(self, other: Cone) -> tuple[set[int], list[int]]:
        """What the other's beginning is made of, found here, and what of the beginning here is made of it."""
        made_of = {i for n in other.first for i in other._values[n].inputs if not other._values[i].given}
        found = other._there
        prints = ((other._values[i].prints, found.within[i]) for i in made_of)
        there = {n for p, within in prints if p and p.telling for n in found.seen.find_whole(p, within)}
        return there, [n for n in self.first if there.intersection(self._values[n].inputs)]

    def _led(self, ends: list[int]) -> set[int]:
        led = reached(ends, lambda n: () if self._there.has(n) else self._values[n].inputs)
        return {n for n in led if not self._there.has(n)}

    def _lifted(self, number: int, moved: bool = True) -> str:
        """The module in which a value was made, or that which holds what fed it wrongly.

        It was where the module is right by itself, or what it is made of is there in another order.

        Args:
            moved: whether its borders may lie elsewhere in the other network. Where no module is known to be
                right nothing says so but how values downstream agree, which a norm brings about as well.
        """
        constants = [i for i in self._values[number].inputs if not self._values[i].weight]
        if constants and all(map(self._there.lacks_constant, constants)):  # the layer is given others
            return common([self._values[i].scope for i in constants])
        scope = common([self._values[n].scope for n in (self._moved(number) if moved else {number})])
        if (turned := self._there.in_another_order(number)) is not None:
            return common([scope, self._values[turned].scope])
        own = bool(scope) and scope == self._values[number].scope
        if own and self._there.applied_otherwise(number):
            # who is given that is no more accused than who gives it: what holds both is
            scope = scope.rpartition(".")[0]
        while scope and self._right(scope):
            scope = common([scope.rpartition(".")[0], *self._came_from(number, scope)])
        return scope

    def _came_from(self, number: int, scope: str) -> set[str]:
        """The modules outside of ``scope`` that made what went into it, on its way to a value."""

        def made_of(at: int) -> list[int]:
            value = self._values[at]
            inside = at == number or lies_in(value.scope, scope)
            return [i for i in value.inputs if not self._values[i].given] if inside else []

        scopes = {self._values[at].scope for at in reached(made_of(number), made_of)}
        return {found for found in scopes if not lies_in(found, scope)}

    def _moved(self, number: int) -> set[int]:
        """Where borders were moved: all up to the first values that the other nearly has.

        So they were where another module on that way is not right by itself either; else a fault of one is
        damped by those behind it.
        """
        at = self._values[number].scope
        network = self._absent.intersection(self._before_the_loss)
        inside, border = self._there.border(number, lambda n: n in network and not self._there.nearly(n))
        reached = border & network
        ended = any(not any(use in self._before_the_loss for use in self._uses[n]) for n in inside)
        others = {self._values[n].scope for n in inside | reached}
        changed = any(not lies_in(at, s) and not self._right(s) for s in others)
        slightly = any(self._there.nearly(n, ABOUT) for n in inside | reached if self._values[n].scope == at)
        return inside | reached if reached and changed and not ended and not slightly else {number}
