"""Is the float32 difference within what rounding may do at all, by the a-priori bound?

|fl(y) - y| <= gamma_K (|W| * |x|) with gamma_K = K u / (1 - K u) for a sum of K products in any order
(Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1). One more pass over absolute
values gives |W| * |x|, one over ones gives K; their backward passes give the same for both gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.local import Local
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.network.calling import copied, each_tensor
from driftlab.precision import FLOAT32
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.rounding import UNIT_ROUND_OFF
from driftlab.words import Finding

SUMS_OF_PRODUCTS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class Bound:
    """For one pass: the largest share of the bound that was used up, and how many bits are right.

    Attributes:
        terms: K, the longest sum.
        share: max |difference| / (2 gamma_K |W| * |x|), above 1 it is no rounding of this dtype in any order.
        bits: -log2 of max |difference| / (|W| * |x|): 24 where float32 rounded once.
    """

    pass_: str
    terms: int
    share: float
    bits: float


def rounding_bounds(mine: nn.Module, call: Recorded, own: Passes, other: Passes) -> list[Bound]:
    """The bound of each pass of a sum of products, against two float32 results of it.

    Args:
        mine: the reference's module, one of ``SUMS_OF_PRODUCTS``.
        own, other: the two, ``other`` by the names of ``own``.
    """
    sums = run(_changed(mine, torch.abs), _mapped(call, torch.abs), "float64", evaluate=False)
    terms = run(_changed(mine, torch.ones_like), _mapped(call, torch.ones_like), "float64", evaluate=False)
    found = []
    for pass_ in ("forward", "input gradient", "weight gradient"):
        parts = [
            _part(
                own.tensors[pass_][n],
                other.tensors[pass_][n],
                sums.tensors[pass_][n],
                terms.tensors[pass_][n],
            )
            for n in own.tensors[pass_]
            if n in other.tensors[pass_]
        ]
        if parts:
            k, share, relative = (max(p[i] for p in parts) for i in range(3))
            bits = 53.0 if relative == 0 else float(-torch.log2(torch.tensor(relative)))
            found.append(Bound(pass_, int(k), share, bits))
    return found


def _part(a: Tensor, b: Tensor, sums: Tensor, terms: Tensor) -> tuple[float, float, float]:
    u = UNIT_ROUND_OFF["float32"]
    gamma = terms * u / (1 - terms * u)
    apart = (a - b).abs()
    zero = torch.zeros_like(apart)
    share = torch.where(apart == 0, zero, apart / (2 * gamma * sums))
    relative = torch.where(apart == 0, zero, apart / sums)
    return float(terms.max()), float(share.max()), float(relative.max())


def _changed(module: nn.Module, change) -> nn.Module:
    twin = copied(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(change(parameter))
    return twin


def _mapped(call: Recorded, change) -> Recorded:
    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    args, kwargs = each_tensor(changed, (call.args, call.kwargs))
    gradients = {n: None if g is None else change(g) for n, g in call.gradients.items()}
    return replace(call, args=args, kwargs=kwargs, gradients=gradients)


def ask(found: Examination) -> list[Finding]:
    """Asked of rewritten linears and convolutions that are the same function.

    It supports no verdict: an algorithm may be less accurate than a plain sum (Winograd, FFT) and right, or
    keep fewer bits; which of them, ``precision`` says.
    """
    if found.pair.precision is not FLOAT32:
        return [PROBE.not_applicable("the bound is that of sums in float32")]
    local = found.local
    sums = [n for n in local.rewritten() if isinstance(local.pair(n)[0], SUMS_OF_PRODUCTS)]
    bounds = [(b, name) for name in sums if local.agrees(name) for b in _bounds(local, name)]
    if not bounds:
        return [PROBE.not_applicable("no rewritten linear or convolution stands alone")]
    bound, name = max(bounds, key=lambda found: found[0].share)
    where = f"{bound.pass_} of {name}, sums of up to {bound.terms} products"
    says = f"at most {bound.share:.2g} of it ({where}): {bound.bits:.1f} bits of |W| * |x| agree"
    if bound.share > 1:
        says += "; more than reordering a float32 sum can make. Another algorithm (Winograd, FFT) may: what "
        says += "it loses, precision says"
    return [PROBE.finding(bound.share, None, says)]


def _bounds(local: Local, name: str) -> list[Bound]:
    mine, theirs = local.pair(name)
    call = local.calls[name][0]
    try:
        own = run(mine, call, "float32", evaluate=False)
        other = run(theirs, call, "float32", evaluate=False, beside=own)
        return rounding_bounds(mine, call, own, _by_own_names(local, name, other))
    except CannotRunError:
        return []


def _by_own_names(local: Local, name: str, passes: Passes) -> Passes:
    """Weight gradients under the names that the reference's module has for them."""
    theirs = local.counterparts[name]
    gradients = {f"{theirs}.{n}": t for n, t in passes.tensors["weight gradient"].items()}
    folded = {n.removeprefix(f"{name}."): t for n, t in local.fold(gradients).items()}
    return Passes(passes.tensors | {"weight gradient": folded})


PROBE = Probe(
    name="rounding_bound",
    question="Is the float32 difference of each rewritten sum of products within its a-priori rounding "
    "bound?",
    threshold=1.0,
    reason="2 gamma_K (|W| * |x|), gamma_K = K u / (1 - K u), is what two orders of a sum may differ by",
    unit="share of the a-priori bound",
    sees="linears and convolutions: the share of the bound that is used up, and the bits that agree",
    misses="evidence only: Winograd and FFT may exceed it and be right",
    order=60,
    ask=ask,
    decides=False,
)
