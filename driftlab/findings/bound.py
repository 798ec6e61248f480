"""Is the float32 difference within what rounding may do at all, by the a-priori bound?"""

from __future__ import annotations

from driftlab.examination import Examination
from driftlab.probes.arithmetic import CannotRunError, Passes, run
from driftlab.probes.bound import SUMS_OF_PRODUCTS, Bound, rounding_bounds
from driftlab.probes.locating import Local
from driftlab.verdict import Evidence

QUESTION = "Is the float32 difference of each rewritten sum of products within its a-priori rounding bound?"


def ask_bound(found: Examination) -> None:
    """Asked of rewritten linears and convolutions that are the same function.

    It supports no verdict: an algorithm may be less accurate than a plain sum (Winograd, FFT) and right, or
    keep fewer bits; which of them, ``precision`` says.
    """
    local, worst = found.local, None
    for name in local.rewritten():
        if isinstance(local.pair(name)[0], SUMS_OF_PRODUCTS) and _agrees(local, name):
            for bound in _bounds(local, name):
                worst = (
                    max(worst, (bound.share, name, bound), key=lambda w: w[0])
                    if worst
                    else (bound.share, name, bound)
                )
    if worst is None:
        found.add(
            Evidence(
                "rounding_bound", QUESTION, None, 1.0, None, "no rewritten linear or convolution stands alone"
            )
        )
        return
    share, name, bound = worst
    reading = (
        f"at most {share:.2g} of it ({bound.pass_} of {name}, sums of up to {bound.terms} products): "
        f"{bound.bits:.1f} bits of |W| * |x| agree"
    )
    if share > 1:
        reading += "; more than reordering a float32 sum can make"
    found.add(Evidence("rounding_bound", QUESTION, share, 1.0, None, reading))


def _agrees(local: Local, name: str) -> bool:
    return bool(local.comparisons(name)) and local.wrong(name, few=True) is None


def _bounds(local: Local, name: str) -> list[Bound]:
    mine, theirs = local.pair(name)
    call = local.calls[name][0]
    try:
        own, other = (run(m, call, "float32", evaluate=False) for m in (mine, theirs))
        return rounding_bounds(mine, call, own, _by_own_names(local, name, other))
    except CannotRunError:
        return []


def _by_own_names(local: Local, name: str, passes: Passes) -> Passes:
    """Weight gradients under the names that the reference's module has for them."""
    gradients = {f"{local.pairs[name]}.{n}": t for n, t in passes.tensors["weight gradient"].items()}
    folded = {n.removeprefix(f"{name}."): t for n, t in local.fold(gradients).items()}
    return Passes(passes.tensors | {"weight gradient": folded})
