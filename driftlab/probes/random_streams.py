"""Random layers that draw in another order: told from random layers that draw otherwise.

A rewrite may draw its dropout masks in another order, or in other pieces, and is none the worse for it; but
no two of its outputs are then comparable one by one. What can be compared is the distribution: mean and
spread over many seeds of the outputs, and of what eval mode gives after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.local import Local
from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.blame import unless_ours
from driftlab.fold.layout import flat
from driftlab.fold.unfold import floating_tensors
from driftlab.network.calling import copied, evaluation_mode, named_leaves, random_state, seed_random_layers
from driftlab.network.modules import lies_in
from driftlab.network.outputs import Leaves, Outputs
from driftlab.network.pair import Pair
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.words import Finding, Place, Verdict

DRAWS = 256
# Of outputs, and of eval mode after that, sixteen statistics each are looked at, each of which is beyond six
# standard errors once in 500 million (normal tails).
SIGMAS = 6.0
_DIRECTIONS = 7


def is_random(module: nn.Module, call: Recorded) -> bool:
    """Whether the output depends on torch's random state, or on a random state of the module's own."""
    outputs = [flat(leaves.values()) for leaves in _returned(module, call, range(3))]
    return any(o.shape != outputs[0].shape or not torch.equal(o, outputs[0]) for o in outputs[1:])


def same_distribution(
    mine: nn.Module,
    theirs: nn.Module,
    call: Recorded,
    outputs: Outputs | None = None,
    *,
    evaluated: bool = False,
) -> float:
    """The largest difference, in standard errors: above ``SIGMAS`` the two distributions are not the same.

    Of means along some directions, and of the mean square, over ``DRAWS`` independent seeds each.

    Args:
        outputs: which output of the one is which of the other's.
        evaluated: of what each gives in eval mode after the call.
    """
    outputs, run = outputs or Outputs(), partial(_returned, call=call, evaluated=evaluated)
    first, other = (next(run(m, seeds=range(1))) for m in (mine, theirs))
    both = list(outputs.of(other, first))
    samples = [
        [flat(leaves[n] for n in both) for leaves in run(mine, seeds=range(DRAWS))],
        [
            flat(outputs.of(leaves, first)[n] for n in both)
            for leaves in run(theirs, seeds=range(DRAWS, 2 * DRAWS))
        ],
    ]
    if len({o.shape for outputs in samples for o in outputs}) > 1:
        return float("inf")
    ours, others = map(torch.stack, samples)
    centre = ours.mean(0)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(_DIRECTIONS, ours.shape[1], generator=generator, dtype=torch.float64)
    directions = torch.cat([directions, centre[None]]).to(ours.device)
    size = ours.abs().mean() * directions.abs().mean() * ours.shape[1] ** 0.5
    return max(0.0, *(_apart(of(ours), of(others), size) for of in _statistics(centre, directions)))


def _statistics(centre: Tensor, directions: Tensor) -> list[Callable[[Tensor], Tensor]]:
    projected = [lambda draws, d=d: (draws - centre) @ d for d in directions]
    squared = [lambda draws, d=d: ((draws - centre) @ d) ** 2 for d in directions]
    return [*projected, *squared, lambda draws: ((draws - centre) ** 2).sum(1)]


def _apart(a: Tensor, b: Tensor, size: Tensor) -> float:
    """The difference of two means in its standard errors (Welch); 0 where it is no more than rounding."""
    error = (a.var() / len(a) + b.var() / len(b)).sqrt()
    apart = (a.mean() - b.mean()).abs()
    floor = 1e-5 * size
    return 0.0 if bool(apart <= floor) else float(apart / error) if bool(error > 0) else float("inf")


@torch.no_grad()
def _returned(
    module: nn.Module, call: Recorded, seeds: Iterable[int], evaluated: bool = False
) -> Iterator[Leaves]:
    """One call after the other of the same copy, which may keep a generator of its own.

    Always from the same buffers: statistics that move from call to call are no random numbers.
    """
    twin = copied(module)
    start = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    for seed in seeds:
        for name, buffer in twin.named_buffers():
            buffer.copy_(start.get(name, buffer))
        seed_random_layers(seed)
        out = call.called(twin, own_inputs(call))
        if evaluated:
            with evaluation_mode(twin):
                out = call.called(twin, own_inputs(call))
        yield named_leaves(out)


def drawn_otherwise(found: Examination, located: tuple[str, Difference] | None) -> Finding | None:
    """What to say where what differs is how random numbers are drawn; None where it is something else.

    Only a module that differs forward and is random in both is asked. If it draws from the same distribution,
    the two cannot be compared step by step, which ``found`` is told.
    """
    module, difference = located or ("", found.network.wrong()[0])
    local = found.local
    mine, theirs = local.pair(module)
    call = local.calls[module][0] if module else found.whole
    if difference.pass_ != "forward" or not (is_random(mine, call) and is_random(theirs, call)):
        return None
    others = [n for n in local.calls if n in local.counterparts and not _related(n, module)]
    if any(_wrong_forward(local, n) for n in others):
        return None
    outputs, name = None if module else found.pair.outputs, module or "the network"
    sigmas = same_distribution(mine, theirs, call, outputs)
    if not sigmas <= SIGMAS:
        return None
    found.comparable = False
    kept = same_distribution(mine, theirs, call, outputs, evaluated=True)
    if not kept <= SIGMAS:
        says = f"{{place}}: {name} draws from the same distribution in training mode, and what it keeps "
        says += f"of it for eval mode is another (means and spreads {kept:.1f} standard errors apart)"
        return PROBE.finding(kept, Verdict.BUG, says, Place(module, "eval", 0))
    says = (
        f"the random layers of {name} draw their numbers in another order, from the same distribution (means "
        f"and spreads within {max(sigmas, kept):.1f} standard errors); runs cannot be compared step by step"
    )
    return PROBE.finding(max(sigmas, kept), Verdict.NONDETERMINISTIC, says, Place(module, "forward", 0))


def after_a_call(found: Examination) -> Pair:
    """The pair in eval mode after a training call of each: as both begin, but that a call was counted.

    Weights and floating buffers are put back, since random numbers may have gone into those.
    """
    called = []
    for network in (found.pair.reference, found.pair.candidate):
        twin = copied(network)
        start = {name: tensor.clone() for name, tensor in floating_tensors(twin).items()}
        seed_random_layers(found.pair.seed)
        found.whole.called(twin, own_inputs(found.whole))
        for name, tensor in floating_tensors(twin).items():
            if tensor.shape == start.get(name, tensor).shape:  # a buffer may grow
                tensor.copy_(start.get(name, tensor))
        called.append(twin.eval())
    return replace(found.pair, reference=called[0], candidate=called[1])


def draw_apart(found: Examination) -> bool:
    """Whether one call of each, from the same seed, leaves torch's generators in different states."""
    states = set()
    with unless_ours():  # a copy may not run by itself
        for network in (found.pair.reference, found.pair.candidate):
            next(_returned(network, found.whole, range(1)))
            states.add(random_state())
    return len(states) > 1


def _wrong_forward(local: Local, name: str) -> bool:
    """A difference elsewhere that is no matter of random numbers."""
    wrong = local.wrong(name)
    return wrong is not None and not is_random(local.pair(name)[0], local.calls[name][0])


def _related(name: str, other: str) -> bool:
    """Whether one of the two modules is, or lies in, the other."""
    return lies_in(name, other) or (bool(name) and lies_in(other, name))


PROBE = Probe(
    name="random_streams",
    question="Do random layers draw from the same distribution in both, though not the same numbers?",
    threshold=SIGMAS,
    reason=f"standard errors, over {DRAWS} seeds: one false alarm in fifteen million",
    unit="standard errors",
    sees="where a random layer differs: dropout drawn in another order or in pieces; averages kept otherwise",
    misses="a rate that is off by less than about a tenth of itself",
    order=25,
)
