"""Does each network repeat itself? Asked before all else, and again before anybody is accused.

Where it does not, no later difference means anything. Each network is run ``REPEATS`` times over, forward,
backward and in eval mode.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import PASSES, distance, same_values
from driftlab.arithmetic.passes import Passes, Recorded, own_inputs, run
from driftlab.blame import unless_ours
from driftlab.network.calling import copied, named_leaves, seed_random_layers
from driftlab.network.compiled import comes_by_compiled, compiled_parts, is_scripted
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.process import noticed
from driftlab.words import Finding, Place, Verdict

# A fault that strikes in one run of eight slips through four repetitions in three cases of five; the window's
# second run, twenty steps and more, is what catches the rare ones.
REPEATS = 4


@dataclass(frozen=True)
class Wobble:
    """The first pass in which a network did not repeat itself, and by how much (relative, 2-norm).

    Attributes:
        unordered: the operations that torch itself says have no kernel here that repeats itself.
    """

    pass_: str
    module: str | None
    floor: float
    unordered: tuple[str, ...] = ()


def repeats(network: nn.Module, whole: Recorded, seed: int = 0, times: int = REPEATS) -> Wobble | None:
    """None where the network gives the same bits each time; else where it does not.

    Raises:
        CannotRunError: it does not run at all.
    """
    first = run(network, whole, "float32", seed, compiled=True)
    for _ in range(times - 1):
        again = run(network, whole, "float32", seed, compiled=True)
        for pass_ in PASSES:
            if found := _moved(first, again, pass_):
                wobble = _located(network, whole, seed, pass_, *found)
                return replace(wobble, unordered=_unordered(network, whole, seed))
    return None


def _unordered(network: nn.Module, whole: Recorded, seed: int) -> tuple[str, ...]:
    """As its deterministic algorithms warn of, which a measurement turns on."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(network, whole, "float32", seed, compiled=True)
    said = (re.match(r"(\S+) does not have a deterministic implementation", str(w.message)) for w in told)
    return tuple(dict.fromkeys(found[1] for found in said if found))


def _located(network: nn.Module, whole: Recorded, seed: int, pass_: str, name: str, floor: float) -> Wobble:
    """The module whose output moves, if any does; else the one whose gradient, nearest to the loss, did."""
    for mode in ("forward", "eval") if whole.loss is not None else ():
        module = _where(network, whole, seed, mode)
        if module is not None:
            return Wobble(mode, module, floor)
    owner = name.rpartition(".")[0] if pass_ in ("weight gradient", "buffer") else None
    return Wobble(pass_, owner, floor)


def _moved(first: Passes, again: Passes, pass_: str) -> tuple[str, float] | None:
    """The last tensor of a pass that moved, and the largest relative difference among all."""
    name, floor = None, 0.0
    for key, tensor in first.tensors.get(pass_, {}).items():
        other = again.tensors[pass_].get(key)
        if other is None or not same_values(tensor, other):
            size = float(torch.linalg.vector_norm(tensor))
            off = distance(other, tensor) if other is not None else float("inf")
            name, floor = key, max(floor, off / size if size else off)
    return (name, floor) if name is not None else None


def _where(network: nn.Module, whole: Recorded, seed: int, mode: str) -> str | None:
    """The module, as deep as can be, whose output was the first to change from one run to the next."""
    first = _outputs(network, whole, seed, mode)
    for _ in range(6 * REPEATS):
        again = _outputs(network, whole, seed, mode)
        for (name, mine), (_, theirs) in zip(first, again, strict=False):
            if len(mine) == len(theirs) and not all(map(same_values, mine, theirs)):
                return name
    return None


def _outputs(network: nn.Module, whole: Recorded, seed: int, mode: str) -> list[tuple[str, list[Tensor]]]:
    """The floating outputs of every call of every module, in the order in which the calls ended."""
    network, seen = copied(network), []
    if mode == "eval":
        network.eval()

    def keep(name: str, module: nn.Module, args: tuple, output: object) -> None:
        seen.append((name, [t.detach().clone() for t in named_leaves(output).values()]))

    for name, module in network.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
            module.register_forward_hook(partial(keep, name))
    seed_random_layers(seed)
    with torch.no_grad():
        whole.called(network, own_inputs(whole))
    return seen


# Before an accusation. A fault that strikes one call in eight stays hidden in one case in ten thousand.
AGAIN_NETWORK, AGAIN_MODULE = 8, 64


def ask(found: Examination) -> list[Finding]:
    pair = found.pair
    for role in ("reference", "candidate"):
        network = getattr(pair, role)
        with noticed(f"the {role}"):
            if _is_compiled(network, found.whole):
                found.compiled.append(role)
                torch.compiler.reset()  # whatever torch had given up on is compiled again
            wobble = repeats(network, found.whole, pair.seed)
            if wobble and (
                role in found.compiled or is_scripted(network)
            ):  # its first calls are what it is optimised by
                wobble = repeats(network, found.whole, pair.seed)
        if wobble:
            return [_accused(found, role, wobble)]
    return [PROBE.finding(0.0, None, "both do")]


def _is_compiled(network: nn.Module, whole: Recorded) -> bool:
    """Whether ``torch.compile`` has a part in it, or in what its forward calls."""

    def forward() -> object:
        with torch.no_grad():
            return whole.called(copied(network), own_inputs(whole))

    with unless_ours():  # what it raises here, it raises when it is asked
        return bool(compiled_parts(network)) or comes_by_compiled(forward)
    return False


def _accused(found: Examination, role: str, wobble: Wobble) -> Finding:
    known = found.pair.reference_name(wobble.module) if role == "candidate" else wobble.module
    says = (
        f"the {role} does not: {{place}} moves by {wobble.floor:.2g} (relative) from run to run, "
        "so that no difference between the two means anything"
    )
    if wobble.unordered:
        says += f"; torch has no kernel that repeats itself here of {', '.join(wobble.unordered)}"
    place = Place(known, wobble.pass_, 0)
    return PROBE.finding(wobble.floor, Verdict.NONDETERMINISTIC, says, place, supersedes=(PROBE.name,))


def wavers(found: Examination, module: str | None) -> Finding | None:
    """What to say instead where the candidate, about to be accused in ``module``, does not repeat itself."""
    pair = found.pair
    wobble = repeats(pair.candidate, found.whole, pair.seed, AGAIN_NETWORK)
    if wobble is None and module and module in pair.counterparts and found.local.comparisons(module):
        call: Recorded = found.local.calls[module][0]
        wobble = repeats(found.local.pair(module)[1], call, pair.seed, AGAIN_MODULE)
        wobble = wobble and replace(wobble, module=pair.counterparts[module])
    return _accused(found, "candidate", wobble) if wobble else None


PROBE = Probe(
    name="determinism",
    question="Does each network repeat itself, bit for bit, from the same state, batch and random seed?",
    threshold=0.0,
    reason=f"equal bits, {REPEATS} times over; up to {AGAIN_MODULE} times before anybody is accused",
    unit="relative difference",
    sees="other random numbers, unordered sums, clocks, shared counters",
    misses="what strikes less than about once in a hundred calls",
    order=10,
    ask=ask,
    asserted=True,
    as_compiled=True,
)
