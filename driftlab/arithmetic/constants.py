"""Constants stored in float32, where the other network computes them: half a unit in the last place off.

The control is to move every such stored value by one unit in its last place. What differs by no more than
that moves the result is what rounding the constants once makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference, distance
from driftlab.arithmetic.local import Local
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.arithmetic.quantities import read_both
from driftlab.arithmetic.shadow_tensor import Native
from driftlab.network.calling import copied
from driftlab.network.pair import Pair, in_another_form

# A difference of float32's own unit round-off and not much more; anything larger is no stored rounding.
LARGEST = 2.0**-20
# A training may make a thousand times more of it. Only what is gone once both make their constants in
# float32 is taken for that: then they are the same as they run.
AMPLIFIED = 2.0**-10
# The same of a network in 16 bits, whose tables are rounded to them with everything else, in their eps.
IN_16_BITS = 4
# A stored value comes out of a few float32 operations, each of them half a unit off at most; the control
# moves it by one unit.
WITHIN = 4.0
# Each by chance, all one way, and each row of a tensor one way: the errors of a scale are those of all its
# products.
TRIALS = ("by chance", "by chance", "all", "rows")


def besides_constants(pair: Pair, whole: Recorded, wrong: list[Difference]) -> list[Difference]:
    """``wrong`` without what stored constants explain, where larger differences stand beside it."""
    larger = [d for d in wrong if not d.relative < LARGEST or d.overflows]
    small = [d for d in wrong if d not in larger]
    return larger if larger and small and rounded_constants(pair, whole, small) else wrong


def rounded_constants(
    pair: Pair, whole: Recorded, wrong: list[Difference], local: Local | None = None, module: str = ""
) -> str | None:
    """What explains ``wrong``, in words; None where stored constants do not.

    Args:
        module: by its name, whose differences they are; of the whole networks where it is left out.
    """
    largest = max((d.relative for d in wrong), default=0.0)
    amplified = max(AMPLIFIED, IN_16_BITS * torch.finfo(pair.precision.dtype).eps)
    if not wrong or not largest < amplified or any(d.overflows or d.excess("shadow") <= 1 for d in wrong):
        return None  # too large, or not in the float32 path
    if not largest < LARGEST and pair.judged == "float64":
        return None
    stored = str(pair.precision.dtype).removeprefix("torch.")
    read = _reader(pair, whole, local, module)
    if any(_gone_natively(read, wrong, native) for native in _STORED):
        return f"{wrong[0].relative:.1g} (relative) that making constants in {stored} makes"
    if not largest < LARGEST:
        return None
    explained = [role for role in ("candidate", "reference") if _explains(pair, role, whole, wrong)]
    if not explained:
        return None
    whose = explained[0]
    return f"{wrong[0].relative:.1g} (relative) that rounding the {whose}'s constants to {stored} makes"


# Not together at first: what both write as it is (x / 3 and x * (1 / 3)) would part by rounding its numbers.
_STORED = (Native.TABLES, Native.NUMBERS, Native.TABLES | Native.NUMBERS)


def _reader(
    pair: Pair, whole: Recorded, local: Local | None, module: str
) -> Callable[..., tuple[dict, dict]]:
    """Gives what the two modules, or the whole networks, make of the same inputs in shadow execution."""
    if local and module:
        call, prefixes = local.calls[module][0], local.prefixes(module)
        return partial(read_both, local.pair(module), call, "shadow", local.fold, prefixes, seed=local.seed)
    both, options = (pair.reference, pair.candidate), {"seed": pair.seed, "outputs": pair.outputs}
    return partial(read_both, both, whole, "shadow", pair.fold, **options)


def _gone_natively(read: Callable[..., tuple[dict, dict]], wrong: list[Difference], native: Native) -> bool:
    """Whether both agree once constants are made in float32, as they may be stored."""
    try:
        mine, theirs = read(native=native)
    except CannotRunError:
        return False
    for d in wrong:
        if d.name not in theirs[d.pass_] or d.name not in mine[d.pass_]:
            return False
        apart = distance(theirs[d.pass_][d.name], mine[d.pass_][d.name])
        if replace(d, apart={"shadow": apart}).excess("shadow") > 1:
            return False
    return True


def _explains(pair: Pair, role: str, whole: Recorded, wrong: list[Difference]) -> bool:
    """Whether the constants of one of the two, moved by a unit in the last place, make as much difference."""
    module, own = getattr(pair, role), own_constants(pair, role)
    evaluate = any(d.pass_ == "eval" for d in wrong)
    responses = dict.fromkeys((d.pass_ for d in wrong), 0.0)
    try:
        still = run(module, whole, "shadow", pair.seed, evaluate)
        for trial in enumerate(TRIALS):  # no more of them than it takes
            moved = _moved(module, own, whole, pair.seed, trial, evaluate)
            responses = {pass_: max(r, _response(still, moved, pass_)) for pass_, r in responses.items()}
            if all(d.apart.get("shadow", 0.0) <= WITHIN * responses[d.pass_] for d in wrong):
                return True
    except CannotRunError:
        return False
    return False


def _response(still: Passes, moved: Passes, pass_: str) -> float:
    pairs = ((tensor, moved.tensors[pass_].get(name)) for name, tensor in still.tensors[pass_].items())
    return max((distance(b, a) for a, b in pairs if b is not None), default=0.0)


def own_constants(pair: Pair, role: str) -> list[str]:
    """Floating parameters and buffers of one network that the other has no equal of."""
    module = getattr(pair, role)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if role == "reference":
        names = {*pair.fold.unplaced, *in_another_form(pair)}
    else:
        otherwise = frozenset().union(*(pair.fold.sources(n) for n in in_another_form(pair)))
        names = {*pair.fold.unused, *otherwise}
    return [n for n in tensors if n in names and tensors[n].is_floating_point()]


def _direction(tensor: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """1 away from zero, -1 towards it."""
    if how == "all":
        return torch.ones_like(tensor)
    one_a_row = how == "rows" and tensor.dim() > 1
    shape = (len(tensor), *[1] * (tensor.dim() - 1)) if one_a_row else tensor.shape
    up = torch.rand(shape, generator=generator).to(tensor.device) < 0.5
    return torch.where(up, 1.0, -1.0).to(tensor).expand_as(tensor)


def _moved(
    module: nn.Module, names: list[str], whole: Recorded, seed: int, trial: tuple[int, str], evaluate: bool
) -> Passes:
    """A run with each constant, and each of the tensors ``names``, moved by one unit in the last place."""
    twin, generator = nudged(module, names, trial)
    return run(twin, whole, "shadow", seed, evaluate, nudge=generator)


def nudged(
    module: nn.Module, names: list[str], trial: tuple[int, str] = (0, TRIALS[0])
) -> tuple[nn.Module, torch.Generator]:
    """A copy with the tensors ``names`` moved by a unit in the last place; what moves its other constants."""
    twin, generator = copied(module), torch.Generator().manual_seed(trial[0])
    for name in names:
        prefix, _, key = name.rpartition(".")
        tensor = getattr(twin.get_submodule(prefix), key)
        with torch.no_grad():
            away = torch.where(tensor < 0, -torch.inf, torch.inf).to(tensor)
            tensor.copy_(torch.nextafter(tensor, away * _direction(tensor, trial[1], generator)))
    return twin, generator
