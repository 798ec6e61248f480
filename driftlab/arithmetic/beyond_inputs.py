"""Every rewritten module against its original, beyond what the network happened to feed it.

Integers at several sizes, other sizes, other values. A module counts whose borders are the reference's, which
shows in that it agrees on what the network did feed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from driftlab.arithmetic.comparison import Comparison, compare
from driftlab.arithmetic.integers import IntegerPair, operand_bits
from driftlab.arithmetic.local import Local
from driftlab.arithmetic.passes import CannotRunError, Recorded
from driftlab.arithmetic.sizes import batch_of, other_sizes, other_values, with_gradients, without_ties, zeros
from driftlab.blame import unless_ours
from driftlab.fold.layout import FoldError
from driftlab.rounding import UNIT_ROUND_OFF


@dataclass(frozen=True)
class Fault:
    """Where a rewritten module differs: on which inputs, in which pass, by how much (relative, 2-norm)."""

    module: str
    inputs: str
    pass_: str
    relative: float


@dataclass
class Rewritten:
    """What was asked of the rewritten modules, and what came out.

    Attributes:
        exact: integer checks passed bit for bit; inexact: those that were not, though within rounding.
        inapplicable: modules that are not exact in integers themselves (norms, softmax).
        unplaced: modules of which one has weights that the other has no place for.
        other: comparisons at other sizes and values that agreed; untold: those that ran in float32 alone.
        faults: those that did not.
        other_weights: modules that agree with their own weights and not with integer ones (a row that stays
        zero).
        bits: module -> bits of its operands that it keeps, where the reference keeps all.
        refused: sizes that the candidate raises at and the reference does not, in words.
    """

    exact: int = 0
    inexact: int = 0
    inapplicable: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    other: int = 0
    untold: int = 0
    faults: list[Fault] = field(default_factory=list)
    other_weights: list[str] = field(default_factory=list)
    bits: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def look_beyond(local: Local, names: list[str]) -> Rewritten:
    """The modules ``names`` on integers, at other sizes and on other values."""
    found = Rewritten()
    for name in names:
        call = local.calls[name][0]
        _integers(local, name, call, found)
        for inputs, other, passes in _others(local, name, call):
            _compared(local, name, inputs, other, passes, found)
            if any(f.module == name for f in found.faults):
                break
    return found


def _others(
    local: Local, name: str, call: Recorded
) -> Iterator[tuple[str, Recorded, tuple[str, ...] | None]]:
    mine, _ = local.pair(name)
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for inputs, other in (*other_sizes(call), *other_values(call), zeros(call)):
        passes = ("forward", "eval") if "zeros" in inputs else None
        with unless_ours():  # where the reference does not take this size, it says nothing
            yield inputs, with_gradients(mine, other, noise), passes


def _compared(local: Local, name: str, inputs: str, call: Recorded, passes, found: Rewritten) -> None:
    options = {"prefixes": local.prefixes(name), "seed": local.seed, "judged": local.judged}
    try:
        compared = compare(*local.pair(name), call, local.read, evaluate=False, **options)
    except CannotRunError as error:
        found.refused.append(f"{name} at {inputs}: {error}")
        return
    wrong = [d for d in _wrong(compared) if passes is None or d.pass_ in passes]
    if wrong and not _only_ties(local, name, wrong, call):
        found.faults.append(Fault(name, inputs, wrong[0].pass_, wrong[0].relative))
    elif compared.in_float32_alone and not compared.same_bits:
        found.untold += 1
    else:
        found.other += 1


def _only_ties(local: Local, name: str, wrong: list, call: Recorded) -> bool:
    """Whether only the input gradient differs, and no longer does so once no two inputs are equal."""
    if wrong[0].pass_ != "input gradient":
        return False
    options = {"prefixes": local.prefixes(name), "evaluate": False}
    again = compare(*local.pair(name), without_ties(call), local.read, **options)
    return not again.wrong()


def _wrong(compared: Comparison) -> list:
    """Overflow of float32 on inputs that nobody gave it is no fault of the function.

    Nor is what float32 has no room for: no training will ever show it.
    """
    unit = UNIT_ROUND_OFF["float64" if compared.judged == "float64" else "float32"]
    return [d for d in compared.wrong() if not (d.overflows or d.relative < unit)]


def _integers(local: Local, name: str, call: Recorded, found: Rewritten) -> None:
    pair = IntegerPair(*local.pair(name), local.fold, local.prefixes(name))
    try:
        pair.set_weights(pair.small)
    except FoldError:
        found.unplaced.append(name)
        return
    applicable = False
    for sized in _integer_calls(call):
        seen = None
        with unless_ours():  # refused by the reference, or by the candidate: other sizes say which
            integers = pair.inputs(sized, pair.small)
            seen = pair.exactness(integers)
        if seen is None:
            continue
        applicable = True
        if not seen:
            found.exact += 1
            continue
        found.inexact += 1
        _inexact(pair, integers, name, found)
    if not applicable:
        found.inapplicable.append(name)


def _integer_calls(call: Recorded) -> Iterator[Recorded]:
    few = batch_of(call, 2) or call
    yield few
    for _, other in other_sizes(few):
        yield other


def _inexact(pair: IntegerPair, call: Recorded, name: str, found: Rewritten) -> None:
    """Fewer bits, an algorithm whose constants are no binary fractions, or another function?"""
    compared = compare(pair.mine, pair.theirs, call, pair.fold, prefixes=pair.prefixes, evaluate=False)
    if compared.wrong():
        found.other_weights.append(name)
    elif compared.narrow() and name not in found.bits:
        found.bits[name] = operand_bits(pair, call)
        pair.set_weights(pair.small)
