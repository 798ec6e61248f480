"""The ways back through one network on one batch: what each operand of each call is sent, and is worth.

Along a random direction of all weights what is sent back to an operand is one number, <gradient sent back,
change of the operand>. One backward pass and two forward passes with moved weights give it for every operand
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from driftlab.arithmetic.passes import Recorded, computing, fresh_inputs, in_arithmetic, own_copies
from driftlab.arithmetic.shadow import held, plain
from driftlab.blame import callers
from driftlab.fold.layout import gradient_of
from driftlab.mistakes.call_modes import Key, Operands
from driftlab.network.calling import copied, seed_random_layers
from driftlab.network.modules import calls_in_turn, is_torchs
from driftlab.tracing.scopes import Scopes

# For the two forward passes weights are moved by so much of their size, up and down.
MOVED = 1e-8
# One direction fixes the factor of an operand; two more confirm it by chance in about 1 case of 1e8.
DIRECTIONS = 3
# Gradients that are kept, as numbers of 8 bytes: of a network that sends more back nothing is told.
KEPT = 5e7

Gradients = dict[str, Tensor]
# Of a direction: what is lacked along it, and what each operand is sent.
Told = tuple[float, dict[Key, float]]


@dataclass(frozen=True)
class Operand:
    """What a call is given, or gives.

    Attributes:
        scope: the module that makes the call.
        function: torch's name of it, or that of the module that is called.
        is_weight: whether a weight is given, or the batch, itself.
        line: the code that makes the call, the same at each turn of a loop.
        sent: the gradient that is sent back to it.
    """

    scope: str
    function: str
    is_weight: bool
    line: tuple
    sent: Tensor


class WaysBack:
    """Attributes:
    scopes: the module that is at work.
    """

    def __init__(self, network: nn.Module, whole: Recorded, arithmetic: str, seed: int):
        self._network = copied(network)
        self._operands: Operands | None = None
        self._kept, self._sending = 0, False
        self._modules = dict(self._network.named_modules())
        for name, module in self._modules.items():  # before it is at work: what its caller hands on
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                module.register_forward_pre_hook(self._handing_on(name), with_kwargs=True)
                module.register_forward_hook(self._handed_back())
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # which is how a gradient is stored; none comes sparse by an alias
        self.scopes = Scopes(self._network)
        self._whole, self._arithmetic, self._seed = whole, arithmetic, seed

    def _handing_on(self, name: str) -> Callable:
        def hand_on(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            return self._operands.handed_on(name, args, kwargs) if self._operands else None

        return hand_on

    def _handed_back(self) -> Callable:
        def hand_back(*_: object) -> None:
            if self._operands is not None:
                self._operands.handed_back()

        return hand_back

    def is_own(self, function: str) -> bool:
        """Whether it is a module, and none of torch's."""
        return function in self._modules and not is_torchs(self._modules[function])

    def takes(self, operand: Operand) -> bool:
        """Whether a module of torch's own is given it, so that its caller's code hands it on."""
        return is_torchs(self._modules[operand.scope]) and not operand.is_weight

    def with_code(self, module: str) -> str:
        """The module itself, or who calls the list of modules that it is."""
        while module and calls_in_turn(self._modules[module]):
            module = module.rpartition(".")[0]
        return module

    def hands_on(self, operand: Operand) -> bool:
        """Whether a module is given it, so that nothing is computed of it in the code that does that."""
        return self.takes(operand) or operand.function in self._modules

    def sent(self) -> dict[Key, Operand]:
        """What is sent back to each operand of each call, and to its result; nothing of too many."""
        found: dict[Key, Operand] = {}

        def tap(key: Key, function: str, tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            scope, weight, line = self.scopes.now, tensor.is_leaf, callers()

            def keep(gradient: Tensor | None) -> None:
                # an autograd.Function sends none; a network may differentiate on its way, as for forces
                if gradient is None or not self._sending:
                    return
                self._kept += gradient.numel()
                if self._kept > KEPT:
                    found.clear()
                    return
                before = found[key].sent if key in found else 0.0
                found[key] = Operand(scope, function, weight, line, before + plain(gradient))

            alias = tensor.view_as(tensor)
            alias.register_hook(keep)
            return alias

        self.run(Operands(tap))
        return found

    def told(self, operands: Mapping[Key, Operand], lacks: Mapping[str, Tensor]) -> list[Told]:
        """Along several directions."""
        return [self._told(operands, along, lacks) for along in self._directions(lacks)]

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

    def _told(self, operands: Mapping[Key, Operand], along: Gradients, lacks: Mapping[str, Tensor]) -> Told:
        wanted = sum(float((along[name] * tensor).sum()) for name, tensor in lacks.items())
        ahead, behind = (self._projected(operands, along, by) for by in (MOVED, -MOVED))
        return wanted, {key: (ahead[key] - behind[key]) / (2 * MOVED) for key in ahead.keys() & behind.keys()}

    def _projected(self, operands: Mapping[Key, Operand], along: Gradients, by: float) -> dict[Key, float]:
        """<gradient sent back, operand>, with the weights moved."""
        found: dict[Key, float] = {}

        def look(key: Key, function: str, tensor: Tensor) -> Tensor:
            if key in operands and tensor.shape == operands[key].sent.shape:
                found[key] = float((plain(tensor) * operands[key].sent).sum())
            return tensor

        self.run(Operands(look), {name: by * move for name, move in along.items()}, backward=False)
        return found

    def detached(self, keys: Collection[Key]) -> Gradients:
        """The gradients of a run in which all these are detached."""

        def detach(key: Key, function: str, tensor: Tensor) -> Tensor:
            return tensor.detach() if key in keys else tensor

        return self.run(Operands(detach, {number for number, _ in keys}))

    def run(
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
