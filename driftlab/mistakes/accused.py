"""One quantity of one pair of modules that no rounding explains, number by number."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference, distance, finite_norm
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded
from driftlab.arithmetic.quantities import by_reference_names, read_both
from driftlab.fold.layout import AnyFold, index_of
from driftlab.network.outputs import Outputs
from driftlab.rounding import HALFWAY, HALFWAY_BITS, UNIT_ROUND_OFF
from driftlab.tracing.prints import AGREE

# What of a difference may be left where a mistake explains it. A constant in float32 is off by up to 2^-24.
LEFT = 1e-6


@dataclass(frozen=True)
class Accused:
    """What was accused, and how to ask the reference once more.

    Attributes:
        mine, theirs: the reference's and the candidate's, float64, on the CPU.
        difference: which quantity it is, with its norms.
        arithmetic: the one that the difference was found in.
        reference, call, seed: the reference's module, and what it was given.
        prefix: of its tensors' names within its network.
    """

    mine: Tensor
    theirs: Tensor
    difference: Difference
    arithmetic: str
    reference: nn.Module
    call: Recorded
    seed: int = 0
    prefix: str = ""

    @cached_property
    def apart(self) -> float:
        return distance(self.theirs, self.mine)

    @property
    def name(self) -> str:
        return self.difference.name

    def is_mine(self, found: Tensor | None) -> bool:
        """Whether it is the reference's result, but for rounding."""
        return self._is(self.mine, found)

    def is_theirs(self, found: Tensor | None) -> bool:
        """The candidate's; a constant that it holds with more digits may be left over."""
        return self._is(self.theirs, found, LEFT * self.apart)

    def _is(self, wanted: Tensor, found: Tensor | None, besides: float = 0.0) -> bool:
        if found is None or found.shape != wanted.shape:
            return False
        return distance(wanted, found) <= max(self.rounding, AGREE * finite_norm(wanted), besides)

    @property
    def rounding(self) -> float:
        """How far two right results may be apart, as a 2-norm: as in ``Difference``, by the reference alone.

        The candidate's own float32 error is the fault itself, seen from the reference, and is no yardstick.
        """
        size = max(finite_norm(self.mine), finite_norm(self.theirs), self.difference.scale)
        error = self.difference.errors.get("reference", 0.0)
        error = error if math.isfinite(error) else 0.0
        return HALFWAY * max(UNIT_ROUND_OFF["float64"] * size, 2.0**-29 * error)

    def fits(self, explained: Tensor) -> bool:
        """Whether ``explained`` is the candidate's result but for rounding, and leaves next to nothing over.

        A difference that is itself near rounding is explained by anything; so 2^6.5 of it must be gone too.
        """
        left = distance(self.theirs, explained)
        return left <= self.rounding and left * HALFWAY_BITS <= self.apart

    def quantity(self, passes: Passes) -> Tensor | None:
        """The same quantity of another run of the reference's module."""
        named = by_reference_names(passes, dict, (self.prefix, ""), 0)
        found = named.get(self.difference.pass_, {}).get(self.difference.name)
        return None if found is None else found.cpu()


def are_theirs(
    cases: Sequence[Accused], results: Mapping[str, Tensor], among: Collection[str] | None = None
) -> bool:
    """Whether results are the candidate's in every quantity, but for rounding.

    Of the first, which differs, they leave next to nothing over: a difference near rounding is in any result.

    Args:
        among: these quantities, where one of them differs; None all.
    """
    told = [case for case in cases if among is not None and case.name in among]
    if any(case.apart > case.rounding for case in told):
        cases = sorted(told, key=lambda case: case.apart <= case.rounding)
    if not all(case.is_theirs(results.get(case.name)) for case in cases):
        return False
    return distance(cases[0].theirs, results[cases[0].name]) * HALFWAY_BITS <= cases[0].apart


def accused(
    modules: tuple[nn.Module, nn.Module],
    call: Recorded,
    difference: Difference,
    fold: AnyFold,
    *,
    prefixes: tuple[str, str] = ("", ""),
    seed: int = 0,
    outputs: Outputs | None = None,
    float64: bool = False,
) -> Accused | None:
    """Both modules once more, in the arithmetic that accuses. None where they do not run so again.

    Args:
        float64: whether the two's float64 is as good; it is the faster by far.
    """
    arithmetics = ("shadow", "shadow64", "float64", "float32")
    wrong = [a for a in arithmetics if difference.excess(a) > 1] or ["float32"]
    arithmetic = "float64" if float64 and "float64" in wrong else wrong[0]
    pass_, name = difference.pass_, difference.name
    options = {"seed": seed, "evaluate": pass_ == "eval", "outputs": outputs}
    try:
        read = read_both(modules, call, arithmetic, fold, prefixes, **options)
    except CannotRunError:
        return None
    mine, theirs = (tensors[pass_].get(name) for tensors in read)
    if mine is None or theirs is None:
        return None
    return Accused(mine.cpu(), theirs.cpu(), difference, arithmetic, modules[0], call, seed, prefixes[0])


def worst_element(found: Accused) -> str:
    """How many elements are wrong, which of them most, and what it is instead of what.

    An element exceeds that is further off than its share of what rounding may make of all of them: where all
    keep to theirs, the whole does.
    """
    mine, theirs = found.mine, found.theirs
    if mine.shape != theirs.shape:
        return f"its shape is {list(theirs.shape)}, not {list(mine.shape)}"
    apart = torch.where(mine == theirs, 0.0, (theirs - mine).abs()).nan_to_num(math.inf)
    apart = torch.where(mine.isnan() & theirs.isnan(), 0.0, apart)
    share = found.difference.allowed / math.sqrt(max(1, apart.numel()))
    count, worst = int((apart > share).sum()), int(apart.argmax())
    index = index_of(worst, apart.shape)
    values = _apart_in_digits(float(theirs.flatten()[worst]), float(mine.flatten()[worst]))
    if apart.numel() == 1:
        return f"it is {values}"
    percent = f"{100 * count / apart.numel():.3g} %"
    where = index if len(index) > 1 else index[0]
    exceed = f"{count} of {apart.numel()} elements ({percent}) exceed what rounding may make of one"
    return f"{exceed}; the worst, at {where}, is {values}"


def _apart_in_digits(wrong: float, right: float) -> str:
    """Both with as many digits as it takes to tell them apart."""
    digits = next((d for d in range(6, 17) if f"{wrong:.{d}g}" != f"{right:.{d}g}"), 17)
    return f"{wrong:.{digits}g}, not {right:.{digits}g}"
