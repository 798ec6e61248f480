"""Where a gradient is stopped on its way back, let through or scaled, though the forward pass is right.

Gradients are sums over ways back. A candidate that detaches one operand of one call lacks just what the
reference sends back there, carried on to the weights; one that detaches two of them lacks the sum. Along a
random direction of all weights that is one number, <gradient sent back, change of the operand>. One backward
pass and two forward passes with moved weights give it for every operand at once, and only where the gradient
is stopped is it what the candidate lacks along several directions (Freivalds, Probabilistic machines can use
less running time, 1977). A ``detach`` that the candidate has not is found by running the reference without
it, a norm through whose statistics nothing comes back by running it so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlab.arithmetic.passes import Recorded, computing, fresh_inputs, in_arithmetic, own_copies
from driftlab.arithmetic.shadow import held, plain
from driftlab.fold.layout import gradient_of
from driftlab.mistakes.accused import LEFT
from driftlab.mistakes.call_modes import Key, Operands, Undetached
from driftlab.mistakes.held_statistics import HeldStatistics
from driftlab.network.calling import copied, seed_random_layers
from driftlab.network.modules import common, is_torchs, lies_in
from driftlab.tracing.flow import Scopes

# For the two forward passes weights are moved by so much of their size, up and down.
MOVED = 1e-6
# Directions, and how near a number must be to what is lacked (the central difference is exact to 1e-6).
# One direction fixes the factor of an operand; two more confirm it by chance in about 1 case of 1e8.
DIRECTIONS, NEAR = 3, 1e-4
# Modules that are run one by one at most.
MODULES = 64
# Gradients that are kept, as numbers of 8 bytes: of a network that sends more back nothing is told.
KEPT = 5e7

# Operands of a module of which two may be stopped together, at most.
TOGETHER = 2000

Gradients = dict[str, Tensor]
# Of a direction: what is lacked along it, and what each operand is sent.
_Told = tuple[float, dict[Key, float]]


@dataclass(frozen=True)
class Stop:
    """What makes the reference's gradients the candidate's.

    Attributes:
        scope: the module of the reference in which it lies.
        between: the modules in which it may lie as well; nothing here tells in which.
        of_weight: whether what is stopped is the gradient of a weight itself.
        words: what would do that.
    """

    scope: str
    between: frozenset[str]
    of_weight: bool
    words: str


@dataclass(frozen=True)
class _Operand:
    scope: str
    function: str
    is_weight: bool
    sent: Tensor


def stopped(
    network: nn.Module, whole: Recorded, arithmetic: str, seed: int, lacks: Mapping[str, Tensor]
) -> Stop | None:
    """Where one change of what is sent back makes the reference's gradients the candidate's; else None.

    Args:
        network: the reference.
        lacks: its gradients less the candidate's, by the name of the weight or the number of the input.
    """
    ways = _Ways(network, whole, arithmetic, seed)
    return ways.let_through(lacks) or ways.stopped(lacks) or ways.held(lacks)


class _Ways:
    """The ways back through one network on one batch."""

    def __init__(self, network: nn.Module, whole: Recorded, arithmetic: str, seed: int):
        self._network = copied(network)
        self._operands: Operands | None = None
        self._kept, self._sending = 0, False
        self._modules = dict(self._network.named_modules())
        for name, module in self._modules.items():  # before it is at work: what its caller hands on
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                module.register_forward_pre_hook(self._handing_on(name), with_kwargs=True)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # which is how a gradient is stored; none comes sparse by an alias
        self._scopes = Scopes(self._network)
        self._whole, self._arithmetic, self._seed = whole, arithmetic, seed

    def _handing_on(self, name: str) -> Callable:
        def hand_on(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            return self._operands.handed_on(name, args, kwargs) if self._operands else None

        return hand_on

    def stopped(self, lacks: Mapping[str, Tensor]) -> Stop | None:
        operands = self._sent()
        if not operands:
            return None
        told = [self._told(operands, along, lacks) for along in self._directions(lacks)]
        alone = [key for key in operands if _agree([by / c[key] if c.get(key) else 0.0 for by, c in told])]
        found = alone or _two_of_one_scope(operands, told)
        if not found:
            return None
        own = [operands[key] for key in found]
        scopes = {o.scope.rpartition(".")[0] if self._takes(o) else o.scope for o in own}
        wanted, by = told[0]
        words = _words(own[:1], wanted / by[found[0]]) if alone else _words(own[:2], 1.0)
        handed = {o.function for o in own if self._is_own(o.function)}
        # what a module hands on as it is given it is its own caller's
        between = {m for m in scopes | handed if not any(m != h and lies_in(m, h) for h in handed)}
        return Stop(common(scopes), frozenset(between), any(o.is_weight for o in own), words)

    def _is_own(self, function: str) -> bool:
        """Whether it is a module, and none of torch's."""
        return function in self._modules and not is_torchs(self._modules[function])

    def _takes(self, operand: _Operand) -> bool:
        """Whether a module of torch's own is given it, so that its caller's code hands it on."""
        return is_torchs(self._modules[operand.scope]) and not operand.is_weight

    def _sent(self) -> dict[Key, _Operand]:
        """What is sent back to each operand of each call, and to its result."""
        found: dict[Key, _Operand] = {}

        def tap(key: Key, function: str, tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            scope, weight = self._scopes.now, tensor.is_leaf

            def keep(gradient: Tensor) -> None:
                if not self._sending:  # a network that differentiates on its way, as for forces
                    return
                self._kept += gradient.numel()
                if self._kept > KEPT:
                    found.clear()
                    return
                before = found[key].sent if key in found else 0.0
                found[key] = _Operand(scope, function, weight, before + plain(gradient))

            alias = tensor.view_as(tensor)
            alias.register_hook(keep)
            return alias

        self._run(Operands(tap))
        return found

    def _directions(self, lacks: Mapping[str, Tensor]) -> Iterator[Gradients]:
        """Each as large as the weights are, and around 1 where these are 0, as some are at first."""
        own = {name: plain(tensor) for name, tensor in self._network.named_parameters()}
        sizes = {name: float(own[name].square().mean().sqrt()) or 1.0 for name in lacks if name in own}
        generator = torch.Generator().manual_seed(0)
        for _ in range(DIRECTIONS):
            moves = {
                n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in lacks.items()
            }
            yield {name: move * sizes.get(name, 1.0) for name, move in moves.items()}

    def _told(self, operands: Mapping[Key, _Operand], along: Gradients, lacks: Mapping[str, Tensor]) -> _Told:
        wanted = sum(float((along[name] * tensor).sum()) for name, tensor in lacks.items())
        ahead, behind = (self._projected(operands, along, by) for by in (MOVED, -MOVED))
        return wanted, {key: (ahead[key] - behind[key]) / (2 * MOVED) for key in ahead.keys() & behind.keys()}

    def _projected(self, operands: Mapping[Key, _Operand], along: Gradients, by: float) -> dict[Key, float]:
        """<gradient sent back, operand>, with the weights moved."""
        found: dict[Key, float] = {}

        def look(key: Key, function: str, tensor: Tensor) -> Tensor:
            if key in operands and tensor.shape == operands[key].sent.shape:
                found[key] = float((plain(tensor) * operands[key].sent).sum())
            return tensor

        self._run(Operands(look), {name: by * move for name, move in along.items()}, backward=False)
        return found

    def let_through(self, lacks: Mapping[str, Tensor]) -> Stop | None:
        """In one module or in all, what it detaches is not detached."""
        words = "a gradient that goes on where the reference detaches would do that"
        return self._in_modules(Undetached, lacks, words)

    def held(self, lacks: Mapping[str, Tensor]) -> Stop | None:
        """In one module or in all, norms send nothing back through their statistics."""
        words = "a norm's statistics, held fixed on the way back, would do that"
        return self._in_modules(HeldStatistics, lacks, words)

    def _in_modules(
        self, mode: type[Undetached | HeldStatistics], lacks: Mapping[str, Tensor], words: str
    ) -> Stop | None:
        seen = mode(self._scopes)
        before = self._run(seen)
        one_by_one = [frozenset({scope}) for scope in seen.scopes][:MODULES]
        for scopes in (*one_by_one, frozenset(seen.scopes)) if seen.scopes else ():
            after = self._run(mode(self._scopes, scopes))
            apart = {name: before[name] - after[name] - lack for name, lack in lacks.items()}
            if _norm(apart) <= LEFT * _norm(lacks):
                return Stop(common(scopes), scopes, False, words)
        return None

    def _run(
        self, mode: TorchFunctionMode, moves: Mapping[str, Tensor] | None = None, backward: bool = True
    ) -> Gradients:
        """The gradients of a run with its weights moved; the mode sees no call of the loss."""
        twin, leaves = in_arithmetic(self._network, self._arithmetic), []
        self._operands = mode if isinstance(mode, Operands) else None
        with computing(self._arithmetic):
            args, kwargs = fresh_inputs(self._whole, self._arithmetic, leaves)
            named = dict(twin.named_parameters()) | {str(i): leaf for i, leaf in enumerate(leaves)}
            for name, move in (moves or {}).items():
                values = held(named[name]).detach()
                values.add_(move.to(values))
            given = own_copies((args, kwargs))
            seed_random_layers(self._seed)
            with mode:
                outputs = self._whole.called(twin, given, self._arithmetic)
            if not backward:
                return {}
            loss = self._whole.measured(twin, outputs, self._arithmetic)
            self._sending = True
            loss.backward()
            self._sending = False
        return {name: plain(gradient_of(leaf)).cpu() for name, leaf in named.items()}


def _agree(shares: list[float]) -> bool:
    first, *others = shares
    return bool(first) and all(abs(other - first) <= NEAR * abs(first) for other in others)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors.values()) ** 0.5


def _two_of_one_scope(operands: Mapping[Key, _Operand], told: Sequence[_Told]) -> list[Key]:
    """Keys and values, a state of two tensors: of two that together are sent what is lacked, in all pairs."""
    scopes: defaultdict[str, list[Key]] = defaultdict(list)
    for key, operand in operands.items():
        if all(by.get(key) for _, by in told):
            scopes[operand.scope].append(key)
    found: list[Key] = []
    for keys in (keys for keys in scopes.values() if len(keys) <= TOGETHER):
        both = torch.ones(len(keys), len(keys), dtype=torch.bool).triu(1)
        for wanted, by in told:
            sent = torch.tensor([by[key] for key in keys], dtype=torch.float64)
            both &= (sent[:, None] + sent - wanted).abs() <= NEAR * abs(wanted)
        found += [keys[at] for pair in both.nonzero().tolist() for at in pair]
    return list(dict.fromkeys(found))


def _words(operands: Sequence[_Operand], share: float) -> str:
    """Of one, or of two that are stopped together."""
    given = " and ".join(
        f"what `{o.function}`{f' in `{o.scope}`' if o.scope else ''} is given" for o in operands
    )
    if abs(share - 1) <= NEAR:
        return f"{given}, detached there, would do that"
    return f"{1 - share:.4g} times the gradient of {given} would do that"
