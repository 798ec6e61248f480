"""The values of one network beside those of another: what that has, nearly has, or has in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from driftlab.tracing.flow import Flow, reached
from driftlab.tracing.prints import NEARLY, Prints, Seen


class Beside:
    """
    Args:
        own, other: the flows of the two networks.
        within: how far from the prints of each value of ``own`` those of the same value may be, relative.
    """

    def __init__(self, own: Flow, other: Flow, within: Sequence[float]):
        self._values, self._uses, self._own, self._other = own.values, own.uses(), own, other
        self.within, self.seen = within, other.seen()
        self.prints = [value.prints for value in other.values]
        self._known: dict[int, bool] = {}

    def has(self, number: int) -> bool:
        """Whether the other has it; what holds no numbers is as what it is made of, constants are had."""
        if number not in self._known:
            value = self._values[number]
            if value.given or not value.fed:
                known = True
            elif value.prints is None:
                known = all(map(self.has, value.inputs))
            else:
                known = self.seen.has(value.prints, self.within[number])
            self._known[number] = known
        return self._known[number]

    def lacks_constant(self, number: int) -> bool:
        """Whether it is made of constants alone, and the other has it in no form that is seen."""
        value = self._values[number]
        made = not value.fed and not value.given and value.prints is not None
        return made and value.prints.telling and not self.seen.has(value.prints, self.within[number])

    def border(self, number: int, inner: Callable[[int], bool]) -> tuple[set[int], set[int]]:
        """What is made of a value as far as it is ``inner``, and what is made of that."""
        inside = reached([number], lambda at: filter(inner, self._whole_uses(at)))
        return inside, {use for at in inside for use in self._whole_uses(at)} - inside

    def _whole_uses(self, number: int) -> list[int]:
        """What is made of a value; less its parts, where they are not all of it, or there though others are
        not: of one that is wrong a part may be right."""
        values, size = self._values, self._values[number].size
        parts = {u for u in self._uses[number] if values[u].part and values[u].size < size}
        if sum(values[u].size for u in parts) >= size:
            there = set(filter(self.has, parts))
            parts = there if there < parts else set()
        return [u for u in self._uses[number] if u not in parts]

    def made_up_for(self, number: int) -> bool:
        """Whether something made of it is there, so that it was right, and in another form."""
        _, border = self.border(number, lambda n: not self.has(n))
        prints = (self._values[n].prints for n in border)
        return any(p is not None and p.telling for p in prints)

    def applied_otherwise(self, number: int) -> bool:
        """Whether the other applies the weight of a value to something else of the same size."""
        made_of = [self._values[i] for i in self._values[number].inputs]
        weights = [v.prints for v in made_of if v.weight and v.prints and v.prints.telling]
        given = [v.prints for v in made_of if not v.given and v.prints]
        if len(given) != 1 or not weights:
            return False
        own, taken = given[0], self._taken_with(max(weights, key=lambda p: p.whole[0]))
        if "norm" in self._values[number].made_by[1]:  # which the other may do in steps
            taken = {n for n in taken if not self._is_made_of_it(n, own)}
        of_its_size = [p for n in taken if (p := self.prints[n]) and p.whole[0] == own.whole[0]]
        return bool(of_its_size) and not any(p.same(own, self.within[number]) for p in of_its_size)

    @cached_property
    def _their_uses(self) -> list[list[int]]:
        return self._other.uses()

    def _taken_with(self, weight: Prints) -> set[int]:
        """What the other's operations take beside a weight."""
        values, uses = self._other.values, self._their_uses
        alike = [n for n in self.seen.find(weight.whole) if values[n].weight]
        # what one makes of as many numbers as it has is another form of it
        used = {use for n in alike for use in uses[n] if values[use].size != weight.whole[0]}
        return {i for use in used for i in values[use].inputs if not values[i].given}

    def _is_made_of_it(self, other: int, own: Prints) -> bool:
        """Whether one of the other's is made, of all that both have, of this value alone."""
        values = self._other.values

        def made_of(at: int) -> list[int]:
            if at != other and self._own_seen.has(values[at].prints):
                return []
            read = ((i, values[i]) for i in values[at].inputs)
            return [i for i, value in read if value.prints and value.fed and not value.given]

        ends = {n for n in reached([other], made_of) if not made_of(n)}
        return ends <= set(self.seen.find_whole(own))

    @cached_property
    def _own_seen(self) -> Seen:
        return self._own.seen()

    def in_another_order(self, number: int) -> int | None:
        """The first of the values that one is made of that is there in another order alone."""
        found = None
        while True:
            turned = (i for i in self._values[number].inputs if self._is_turned(i))
            if (number := next(turned, -1)) < 0:
                return found
            found = number

    def _is_turned(self, number: int) -> bool:
        value = self._values[number]
        if value.given or value.prints is None or not value.prints.telling:
            return False
        return self.seen.in_another_order(value.prints, self.prints, self.within[number])

    def nearly(self, number: int, within: float = NEARLY) -> bool:
        prints = self._values[number].prints
        return prints is not None and prints.telling and self.seen.has(prints, within)
