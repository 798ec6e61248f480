"""What a wrong result may look like beside the right one: a factor, something added, another order.

Each explanation is a function that yields what the candidate's result would be, made of the reference's, with
words for it. Numbers that it fits to the two results must be few beside those that it explains.

Nothing is decided by it: it is a hint for whoever looks for the fault. An explanation is said only where it
leaves no more than rounding of the candidate's result unexplained: a wrong one does so by chance as rarely as
two floats of 53 bits are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.mistakes.accused import Accused
from driftlab.mistakes.what_if import what_ifs
from driftlab.network.calling import named_leaves

Explained = Iterator[tuple[str, Tensor]]
# A number that was computed in float64 is this near to what it stands for.
SAME_NUMBER = 1e-9
# Beyond these a number of its own is no simple one.
LARGEST, LARGEST_SQUARE, DENOMINATOR = 4096, 65536, 256


def explained(a: Accused) -> str | None:
    """The first explanation that fits, in words, with what it leaves; None where none does.

    Settings of the reference come first: its own code, run with one of them changed, says more than what two
    results look like.
    """
    if a.arithmetic == "float32" or a.mine.shape != a.theirs.shape or not _all_finite(a):
        return None
    looks = ((words, result) for explain in EXPLANATIONS for words, result in explain(a))
    for words, result in (*what_ifs(a), *looks) if a.mine.numel() else ():
        if result.shape == a.theirs.shape and a.fits(result):
            left = distance(a.theirs, result) / a.apart
            return f"{words} would do that: {f'{left:.0e}' if left else 'nothing'} of the difference is left"
    return None


def _all_finite(a: Accused) -> bool:
    return bool(a.mine.isfinite().all()) and bool(a.theirs.isfinite().all())


def factor(a: Accused) -> Explained:
    """The same, times a number. Of two results that are one number each, only a simple one tells anything."""
    mine, theirs = a.mine, a.theirs
    if not bool(theirs.any()):
        yield "zeros in its place", theirs
        return
    if not bool(mine.any()):
        return
    times = float((mine * theirs).sum() / (mine * mine).sum())
    simple = spelled(times)
    if simple or mine.numel() > 2:
        near_one = f"1 {'+' if times > 1 else '-'} {abs(times - 1):.3g}" if abs(times - 1) < 1e-2 else None
        yield f"a factor of {simple or near_one or f'{times:.6g}'}{_size_of(times, a)}", times * mine


def spelled(number: float) -> str | None:
    """A number that people write down: 8, 1/8, sqrt(8), 1/sqrt(8), 31/32, with its sign; None of another."""
    size, sign = abs(number), "-" if number < 0 else ""
    for of, one_over in ((size, ""), (1 / size if size else math.inf, "1/")):
        if _is_whole(of) and of <= LARGEST:
            return f"{sign}{'' if round(of) == 1 else one_over}{round(of)}"
    for of, one_over in ((size, ""), (1 / size if size else math.inf, "1/")):
        if of * of <= LARGEST_SQUARE and _is_whole(of * of):
            return f"{sign}{one_over}sqrt({round(of * of)})"
    near = Fraction(size).limit_denominator(DENOMINATOR) if math.isfinite(size) else Fraction(0)
    return f"{sign}{near}" if near and abs(float(near) / size - 1) < SAME_NUMBER else None


def _is_whole(number: float) -> bool:
    return math.isfinite(number) and round(number) > 0 and abs(number / round(number) - 1) < SAME_NUMBER


def _size_of(number: float, a: Accused) -> str:
    """What in the module or its batch has the size that a factor is made of."""
    sizes = {round(n): None for n in (abs(number), 1 / abs(number), number**2, number**-2) if _is_whole(n)}
    leaves = [t for t in named_leaves((a.call.args, a.call.kwargs)).values() if t.dim()]
    known = [(t.shape[0], "the batch's size") for t in leaves[:1]]
    known += [(v, f"`{n}`") for n, v in vars(a.reference).items() if type(v) is int and _counts_parts(n)]
    known += [(t.shape[-1], "the inputs' last dimension") for t in leaves[:1]]
    known += [(a.mine.numel(), "the number of elements")]
    named = [name for size, name in known if size in sizes and size > 2]  # a factor of 2 is just that
    return f" ({named[0]} is {next(s for s, n in known if n == named[0])})" if named else ""


def _counts_parts(name: str) -> bool:
    return "group" in name or "head" in name


def added(a: Accused) -> Explained:
    """The same number added to every element, or one to each channel."""
    apart = a.theirs - a.mine
    if apart.numel() > 2:
        mean = apart.mean()
        yield f"{float(mean):+.6g} added to every element", a.mine + mean
    for dim in dict.fromkeys((apart.dim() - 1, 1)):
        if not 0 <= dim < apart.dim() or apart.numel() < 2 * apart.shape[dim]:
            continue
        others = [d for d in range(apart.dim()) if d != dim]
        mean = apart.mean(others, keepdim=True)
        yield f"{_bias(mean.flatten(), a)} (constant along all but dimension {dim})", a.mine + mean


def _bias(added: Tensor, a: Accused) -> str:
    for name, parameter in a.reference.named_parameters():
        own = parameter.detach().double().cpu().flatten()
        if own.shape == added.shape and bool(own.any()):
            for sign, words in ((-1, "left out"), (1, "added once more")):
                if torch.allclose(added, sign * own, rtol=1e-6, atol=1e-9 * float(own.abs().max())):
                    return f"`{name}` {words}"
    return "a bias"


def reordered(a: Accused) -> Explained:
    """The slices along one dimension in another order."""
    for dim, size in enumerate(a.mine.shape):
        if not 3 <= size <= LARGEST:
            continue
        generator = torch.Generator().manual_seed(0)
        mine, theirs = (t.movedim(dim, 0).reshape(size, -1) for t in (a.mine, a.theirs))
        along = torch.randn(mine.shape[1], generator=generator, dtype=torch.float64)
        order = torch.empty(size, dtype=torch.int64)
        order[(theirs @ along).argsort()] = (mine @ along).argsort()
        shown = ", ".join(map(str, order[:8].tolist())) + (", ..." if size > 8 else "")
        yield f"dimension {dim} in the order {shown}", a.mine.index_select(dim, order)


def transposed(a: Accused) -> Explained:
    """Two dimensions of the same size exchanged."""
    shape = a.mine.shape
    for one in range(len(shape)):
        for other in range(one + 1, len(shape)):
            if shape[one] == shape[other] > 1:
                yield f"dimensions {one} and {other} exchanged", a.mine.transpose(one, other)


def shifted(a: Accused) -> Explained:
    """One position earlier or later along a dimension; what falls in at its end may be anything."""
    for dim, size in enumerate(a.mine.shape):
        if size < 4:
            continue
        for by, words, at in ((1, "later", 0), (-1, "earlier", size - 1)):
            moved = a.mine.roll(by, dim)
            moved.select(dim, at).copy_(a.theirs.select(dim, at))
            yield f"the same one position {words} along dimension {dim}", moved


def blanked(a: Accused) -> Explained:
    """Some elements zero, the others right."""
    zero = a.theirs == 0
    share = float(zero.double().mean())
    if 0 < share <= 0.9:  # the rest is enough to tell
        yield f"zeros in place of {100 * share:.3g} % of its elements", a.mine.masked_fill(zero, 0.0)


EXPLANATIONS = (factor, added, transposed, shifted, reordered, blanked)
