"""The values of one network with their numbers, beside another: which that lacks, and which may be which."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property, partial

from torch import Tensor

from driftlab.arithmetic.naming import LOSS
from driftlab.arithmetic.shadow import plain
from driftlab.blame import callers
from driftlab.tracing.flow import SHOWS_PART, Flow, Value, reached
from driftlab.tracing.prints import Prints, of_zeros_and_ones, prints, same_numbers
from driftlab.tracing.rows import Rows
from driftlab.tracing.running import Again
from driftlab.tracing.turns import Callers, Turns

# Numbers that are kept at most; times what a value is moved.
LARGEST, MOVED = 2e7, 1 + 2.0**-10


class Kept:
    """A flow with the numbers of its values; of those with rows that the other has not, of the other rows.

    Attributes:
        full: whether there were too many to be kept.
        size: how many there are.
        tensors: by the number of the value, without axes of one.
        integers: the same of indices, positions and masks, be these of floating numbers.
        turns: what is made again of these.

    Once it was compared:

    Attributes:
        shared: of each value, whether both have it.
        made_of: the last ones before it that both have; itself, if they have it.
        depth: how many operations lie between a value and what both have.
        offered: what may have been made by a mistake, in its order.
        begun: where the way to the results begins that the other network has not.
        original: the first value with the numbers of each, of which it is a copy, perhaps turned.
    """

    def __init__(self, network: Again, rows: Rows | None = None):
        self.rows = rows
        self.tensors: dict[int, Tensor] = {}
        self.integers: dict[int, Tensor] = {}
        self._alike: dict[int, frozenset[int]] = {}
        called_by: dict[int, Callers] = {}
        self.size, self.full = 0, False
        self.flow = network.flow(change=partial(self._keep, called_by), look=partial(prints, rows=rows))
        self.seen, self.turns = self.flow.seen(), Turns(self.flow.values, called_by, self.leading)

    def _keep(self, called_by: dict[int, Callers], number: int, value: Value, tensor: Tensor) -> None:
        self.size += tensor.numel()
        self.full = self.full or self.size > LARGEST
        counts = not (tensor.is_floating_point() or tensor.is_complex())
        made = value.made_by[0] or (value.inputs and not value.fed)  # a mask is written into as well
        known = counts or (made and value.prints is not None)
        if self.full or not known or not tensor.numel():
            return
        values = plain(tensor).cpu()
        kept = self.rows.of(values) if self.rows else None
        numbers = (values if kept is None else kept).squeeze().clone()
        if counts or _is_mask(value, numbers):
            self.integers[number] = numbers
        if not counts and value.made_by[0]:
            self.tensors[number] = numbers
        if number in self.integers or number in self.tensors:
            called_by[number] = callers()

    def compare(self, other: Kept) -> None:
        """Which values the other network has, and where those begin that lead to the results without it."""
        self._other, values = other.seen, self.flow.values
        self.shared = [v.prints is not None and self._other.has(v.prints) for v in values]
        self.made_of: list[set[int]] = []
        self.depth: list[int] = []
        self.original: list[int] = []
        for number, value in enumerate(values):
            made_of: set[int] = {number} if self.shared[number] else set()
            if made_of and value.part:  # the other may take it from there at once
                made_of |= {i for i in value.inputs if self.shared[i]}
            read = [i for i in value.inputs if not (values[i].weight and self.shared[i])]
            if not self.has_whole(number):
                made_of = made_of.union(*(self.made_of[i] for i in read))
            self.made_of.append(made_of)
            made = (i for i in read if values[i].made_by[0] or values[i].inputs)  # or it stands in the code
            copied = (i for i in made if same_numbers(value.prints, values[i].prints))
            self.original.append(self.original[i] if (i := next(copied, None)) is not None else number)
            counted = [i for i in read if values[i].prints is not None] or read  # a mask is not on the way
            deeper = 1 + max((self.depth[i] for i in counted), default=0)
            self.depth.append(0 if self.shared[number] else deeper)
        cone = reached((n for n in self.flow.results.values() if not self.shared[n]), self.lacked)
        made = (n for n in sorted(cone) if values[n].made_by[0] and not values[n].weight)
        # of a result that is joined both may have the parts, though not there
        self.begun = [*filter(self.joins, self.flow.results.values()), *filter(self._is_made_of_both, made)]
        there = (i for n in cone for i in values[n].inputs if self.shared[i])
        # what is done to a result besides, the other alone lacks
        last = self._other_results(other.flow) if not cone else []
        edge = reached([*there, *last], self._gives_its_order)  # which nobody sees in the prints
        self.offered = [n for n in sorted(cone | edge) if n in self.tensors and values[n].prints.telling]

    def _other_results(self, other: Flow) -> list[int]:
        """Its results that are others there."""
        both = ((n, other.results.get(end)) for end, n in self.flow.results.items() if end != LOSS)
        values, theirs = self.flow.values, other.values
        return [n for n, m in both if m is not None and not same_numbers(values[n].prints, theirs[m].prints)]

    def lacked(self, number: int) -> list[int]:
        """What a value is made of that the other network has not."""
        return [i for i in self.flow.values[number].inputs if not self.shared[i]]

    def _is_made_of_both(self, number: int) -> bool:
        """Whether both have what it is made of; weights the other may hold in another form.

        And what is joined to constants, as to a column of ones for a bias, that the other need not have.
        """
        values = self.flow.values
        lacked = [i for i in self.lacked(number) if not values[i].weight]
        joined = len(lacked) < len(values[number].inputs) and self._adds_up(number)
        return not lacked or (joined and not self.fed(lacked))

    def _gives_its_order(self, number: int) -> list[int]:
        """What a value is joined of, or the one that it was made of number by number."""
        values = self.flow.values
        read = [i for i in values[number].inputs if self.shared[i]]
        if self._adds_up(number) and len(read) == len(values[number].inputs):
            return read
        alike = [i for i in read if values[i].size == values[number].size]
        return alike if len(alike) == 1 else []

    def in_order_of(self, numbers: Collection[int]) -> list[int]:
        """These, and those whose order they have: of which one is made alone, or is joined."""

        def made_of(number: int) -> list[int]:
            read = ((i, self.flow.values[i]) for i in self.flow.values[number].inputs)
            given = [i for i, v in read if v.prints is not None and v.fed and not v.given]
            return given if len(given) == 1 or self._adds_up(number) else []

        return sorted(reached(numbers, made_of) & self.tensors.keys())

    def read_shared(self, number: int) -> set[int]:
        """What a value is made of that both have."""
        return {i for i in self.flow.values[number].inputs if self.shared[i]}

    def fed(self, numbers: Collection[int]) -> set[int]:
        """Of these those that the batch or weights went into: constants the other may hold as integers."""
        return {n for n in numbers if self.flow.values[n].fed}

    def looks_like(self, number: int) -> list[int]:
        """The other's values that have its numbers, perhaps in another order; none where it lacks them."""
        return self._other.find_whole(self.flow.values[number].prints) if self.shared[number] else []

    def alike(self, number: int) -> frozenset[int]:
        """The other's values that look like one of its own; where none does, like its slices."""
        if number not in self._alike:
            found, other = self.flow.values[number].prints, self._other
            slices = (p for axis in found.slices for p in axis) if found else ()
            alike = found and (other.find_whole(found) or [n for p in slices for n in other.find(p)])
            self._alike[number] = frozenset(alike or ())
        return self._alike[number]

    def in_another_turn(self, number: int, wanted: Prints) -> bool:
        """Whether what makes a value makes one that looks like ``wanted`` as well, in another turn."""
        found = set(self.turns.alike(number)).intersection(self.seen.find_whole(wanted))
        return not {number}.issuperset(found)

    def before(self, number: int, others: Collection[int], alone: bool = True) -> set[int]:
        """What the other network has not, or might have in another order, and goes into ``others`` alone.

        As far as it leads to a value, which is one of these. Not ``alone``: what goes elsewhere as well.
        """
        values = self.flow.values
        lacked = reached([number], self.lacked_whole)
        lacked |= {i for n in lacked for i in values[n].inputs if i in self._offered}
        if not alone:
            return lacked
        # what is written into a part is written into the whole
        changed = reached(others, lambda n: values[n].inputs if values[n].made_by[1] in SHOWS_PART else ())
        ends = {self.flow.results[end] for end in self.steady} - changed
        return lacked - reached(ends, lambda n: [i for i in values[n].inputs if i not in changed])

    def left_out(self, before: Collection[int]) -> dict[int, Tensor]:
        """What these are made of that the other has not and goes elsewhere as well, moved a little.

        None of it, where it cannot all be moved.
        """
        values = self.flow.values
        read = {i for n in before for i in values[n].inputs if not self.shared[i]}.difference(before)
        movable = all(i in self.tensors and values[i].made_by[0] for i in read)
        return {i: self.tensors[i] * MOVED for i in sorted(read)} if movable else {}

    def lacked_whole(self, number: int) -> list[int]:
        """What a value is made of that the other network has not, or has in slices alone."""
        return [i for i in self.flow.values[number].inputs if not self.has_whole(i)]

    def has_whole(self, number: int) -> bool:
        """Whether both have it, and the other not its slices alone, each of which might stand elsewhere."""
        value = self.flow.values[number]
        if not self.shared[number] or value.given or not value.prints.telling:
            return self.shared[number]
        return bool(self._other.find_whole(value.prints))

    def written(self, number: int) -> int:
        """The value itself; of one that was written into, the last that was written."""
        values = self.flow.values
        while not values[number].made_by[0] and values[number].inputs:
            number = max(values[number].inputs)
        return number

    def taken_from(self, number: int) -> int:
        """The value itself; of a part of one that the other network has not, that one."""
        values = self.flow.values
        while values[number].part and (whole := self.lacked(number)):
            number = whole[0]
        return number

    def joins(self, number: int) -> bool:
        """Whether it is a result that is joined of several values."""
        several = len(self.flow.values[number].inputs) > 1
        return several and self._adds_up(number) and self.is_a_result(number)

    def counts(self, numbers: Collection[int]) -> bool:
        """Whether all of these are indices, positions or masks."""
        return self.integers.keys() >= set(numbers)

    def joined_of(self, number: int) -> list[int]:
        """What a value is joined of, or what it is a copy of."""
        made = self.original[number]
        joined = len(self.flow.values[made].inputs) > 1 and self._adds_up(made)
        return [i for i in self.flow.values[made].inputs if joined]

    def _adds_up(self, number: int) -> bool:
        """Whether it holds as many numbers as all that it is made of."""
        values = self.flow.values
        return sum(values[i].size for i in values[number].inputs) == values[number].size

    def is_a_result(self, number: int) -> bool:
        """Whether its numbers are one of the outputs."""
        values, ends = self.flow.values, self.flow.results.items()
        return any(same_numbers(values[number].prints, values[n].prints) for end, n in ends if end != LOSS)

    @cached_property
    def leading(self) -> set[int]:
        """What leads to the results."""
        return self.flow.leading()

    @cached_property
    def steady(self) -> set[str]:
        """The results that no slope goes into, taken on the way; all where it goes into all of them.

        A value put in changes what is computed of it, and not the slope of what it was computed by.
        """
        values, results = self.flow.values, self.flow.results
        made_of = {end: reached([n], lambda at: values[at].inputs) for end, n in results.items()}
        found = {end for end, made in made_of.items() if not any(values[n].sent_back for n in made)}
        return found or set(results)

    def users(self, number: int) -> set[int]:
        """What is made of a value, or of a copy of it, on the way forward; copies apart."""

        def copies(at: int) -> list[int]:
            return [n for n in self.uses[at] if self.original[n] == self.original[number]]

        copied = reached([number], copies)
        used_by = {n for at in copied for n in self.uses[at]} - copied
        return {n for n in used_by if not self.flow.values[n].sent_back}

    @cached_property
    def uses(self) -> list[list[int]]:
        return self.flow.uses()

    @cached_property
    def _offered(self) -> set[int]:
        return set(self.offered)


def _is_mask(value: Value, numbers: Tensor) -> bool:
    return not value.fed and of_zeros_and_ones(numbers)
