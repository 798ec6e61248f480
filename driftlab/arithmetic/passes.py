"""One forward and backward pass of a module on given inputs, in one of several arithmetics.

``float32`` is the module as it stands. ``float64`` is a copy made double that draws float32's random numbers.
``shadow`` is the float32 code path computed in float64 (``driftlab.arithmetic.shadow``), ``shadow64`` the
float64 code path likewise: they tell rounding, which vanishes there, from a difference in the function, which
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.arithmetic.bounds import within_bounds
from driftlab.arithmetic.draws import Draws, Float32Draws
from driftlab.arithmetic.naming import LOSS, Named
from driftlab.arithmetic.shadow import Shadow, plain, shadow, shadow_arithmetic, shadowed
from driftlab.arithmetic.shadow_tensor import Native
from driftlab.arithmetic.units import unless_zero
from driftlab.blame import AboutThePair, described, not_ours, theirs
from driftlab.fold.layout import gradient_of
from driftlab.network.calling import (
    cast,
    copied,
    each_tensor,
    evaluation_mode,
    seed_random_layers,
    tensors_in,
)
from driftlab.network.compiled import eager
from driftlab.network.loss import loss_in, loss_of, one_number
from driftlab.network.outputs import Outputs
from driftlab.network.pair import Pair
from driftlab.precision import FLOAT32, Precision
from driftlab.words import DiagnoseError


@dataclass
class Recorded:
    """What a module was given: arguments, and the gradients that came back to its floating outputs.

    ``gradients`` holds None for an output, by its name, that got none. Where ``loss`` is set, the module is a
    whole
    network: the loss of its outputs, of the network and in the arithmetic, is differentiated instead.
    """

    args: tuple
    kwargs: dict = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    loss: Callable[[nn.Module, object, str], Tensor] | None = None
    call: Callable[[nn.Module, tuple, dict], object] = lambda module, args, kwargs: module(*args, **kwargs)
    precision: Precision = FLOAT32

    def called(self, module: nn.Module, given: tuple[tuple, dict], arithmetic: str = "float32") -> object:
        """What ``module`` makes of these arguments, in the precision it is to run in."""
        with nullcontext() if arithmetic.endswith("64") else self.precision.forward(module):
            return self.call(module, *given)

    def measured(self, network: nn.Module, outputs: object, arithmetic: str) -> Tensor:
        """The loss, of a whole network that has one, likewise."""
        with nullcontext() if arithmetic.endswith("64") else self.precision.forward(network):
            return self.loss(network, outputs, arithmetic)

    def send_back(self, network: nn.Module, outputs: object) -> None:
        """The gradient of the loss, where there is one."""
        if self.loss is not None:
            self.measured(network, outputs, "float32").backward()


@dataclass
class Passes:
    """What came out, in float64: pass -> name -> tensor.

    ``forward`` and ``eval`` are named by the output (``named_leaves``; the reference's, where it was run
    beside it), ``input gradient`` by the place of the input, ``weight gradient`` and ``buffer`` by the
    module's own tensors, ``update`` (the outputs after one update) as ``forward``, ``side effect`` (of whole
    networks) by the mode and the place of the input.

    Attributes:
        spare: outputs that stand for none of the reference's.
        carried: outputs that the loss depends on, by a gradient that is not zero. Of float32 alone.
        dtypes: as ``tensors``, of what came out as it was.
        rounded: how many numbers a shadow run rounds to a grid.
    """

    tensors: dict[str, dict[str, Tensor]]
    spare: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    dtypes: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    rounded: int = 0


class CannotRunError(AboutThePair, RuntimeError):
    """The module cannot run in this arithmetic; the message is one line."""


def in_arithmetic(module: nn.Module, arithmetic: str) -> nn.Module:
    """A copy of ``module`` ready for ``run``."""
    if arithmetic == "shadow":
        return shadowed(module)
    if arithmetic == "float32":
        return copied(module)
    wide = copied(module).double()
    return shadowed(wide) if arithmetic == "shadow64" else wide


def run(
    module: nn.Module,
    recorded: Recorded,
    arithmetic: str,
    seed: int = 0,
    evaluate: bool = True,
    nudge: torch.Generator | None = None,
    native: Native = Native.NOTHING,
    beside: Passes | None = None,
    outputs: Outputs | None = None,
    unit: torch.Generator | None = None,
    sloped: Mapping[int, Tensor] | None = None,
    compiled: bool = False,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> Passes:
    """Forward, backward and, in eval mode, forward once more, of a copy of ``module``.

    Args:
        beside: what the reference gave: the outputs get its names, and those that it lacks are left out.
        outputs: which stands for which.
        nudge, native: what becomes of the constants of a shadow run, see ``shadow_arithmetic``.
        unit: moves every weight, and every input that has a slope, by one unit in the last place of the
            arithmetic, up or down.
        sloped: by the ``id`` of an input where it has a slope; everywhere where it is left out.
        compiled: whether compiled code runs compiled, as far as whoever calls lets it; else as written.
        optimizer: makes the one whose update comes before a last forward pass; no such pass where None.

    Raises:
        CannotRunError: the module raises in this arithmetic.
    """
    before = Shadow.rounded
    try:
        twin, named = (
            in_arithmetic(module, arithmetic),
            Named(beside.tensors if beside else None, outputs or Outputs(), plain),
        )
        if unit is not None:
            recorded = _moved(twin, recorded, arithmetic, unit, sloped or {})
        with computing(arithmetic, nudge, native, compiled):
            found = _training_pass(twin, recorded, arithmetic, seed, named)
            if evaluate:
                found["eval"], left = _eval_pass(twin, recorded, arithmetic, seed, named)
                found["side effect"] |= left
            if optimizer is not None:
                found["update"] = _updated_pass(twin, recorded, arithmetic, seed, named, optimizer)
    except Exception as error:  # whatever a stranger's forward raises
        not_ours(error)
        said = str(error) if isinstance(error, DiagnoseError) else described(error, 200)
        raise CannotRunError(said) from error
    numbers = {pass_: {n: plain(t) for n, t in tensors.items()} for pass_, tensors in found.items()}
    dtypes = {pass_: {n: t.dtype for n, t in tensors.items()} for pass_, tensors in found.items()}
    return Passes(numbers, named.spare, named.carried, dtypes, Shadow.rounded - before)


def _moved(
    twin: nn.Module,
    recorded: Recorded,
    arithmetic: str,
    unit: torch.Generator,
    sloped: Mapping[int, Tensor],
) -> Recorded:
    """The weights of ``twin`` in place, and the inputs as values of the arithmetic."""
    few = recorded.precision.computes_in if arithmetic == "float32" else None

    def move(tensor: Tensor, where: Tensor | None = None) -> Tensor:
        values = tensor.held if isinstance(tensor, Shadow) else tensor.data
        moved = unless_zero(values, unit, few)
        values.copy_(moved if where is None else torch.where(where, moved, values))
        return tensor

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        own = tensor.detach().clone().to(torch.float64 if arithmetic.endswith("64") else tensor.dtype)
        own = shadow(own) if arithmetic.startswith("shadow") else own
        return move(own, sloped.get(id(tensor))).requires_grad_(tensor.requires_grad)

    for parameter in twin.parameters():
        if parameter.is_floating_point():
            move(parameter)

    args, kwargs = each_tensor(moved, (recorded.args, recorded.kwargs))
    return replace(recorded, args=args, kwargs=kwargs)


def computing(
    arithmetic: str,
    nudge: torch.Generator | None = None,
    native: Native = Native.NOTHING,
    compiled: bool = False,
    draws: Draws | None = None,
) -> ExitStack:
    """Inside, what ``in_arithmetic`` made is run; arguments as of ``run``.

    Args:
        draws: of one that is run again and again.
    """
    stack = ExitStack()
    if not compiled:
        stack.enter_context(within_bounds())  # outermost, so that it sees what is computed in the end
    if arithmetic.startswith("shadow"):
        stack.enter_context(shadow_arithmetic(nudge, native))
    elif not compiled:
        stack.enter_context(eager())
    if arithmetic.endswith("64"):
        stack.enter_context(draws.as_float32() if draws else Float32Draws())
    return stack


def _training_pass(
    twin: nn.Module, recorded: Recorded, arithmetic: str, seed: int, named: Named
) -> dict[str, dict[str, Tensor]]:
    leaves: list[Tensor] = []
    given = own_inputs(recorded, arithmetic, leaves)
    seed_random_layers(seed)
    outputs = recorded.called(twin, given, arithmetic)
    by_name = named.of(outputs, "forward")
    found = {"forward": _own(by_name), "side effect": _left(given, recorded, "training")}
    if recorded.loss is not None:
        if arithmetic == "float32":
            named.watch(by_name)
        loss = recorded.measured(twin, outputs, arithmetic)
        found["forward"][LOSS] = loss.detach()
        loss.backward()
    else:
        _backward(by_name, recorded, arithmetic)
    found["input gradient"] = {str(i): gradient_of(leaf) for i, leaf in enumerate(leaves)}
    found["weight gradient"] = {n: gradient_of(p) for n, p in twin.named_parameters()}
    found["buffer"] = {n: b.clone() for n, b in twin.named_buffers() if b.is_floating_point()}
    return found


def _eval_pass(
    twin: nn.Module, recorded: Recorded, arithmetic: str, seed: int, named: Named
) -> tuple[dict, dict]:
    given = fresh_inputs(recorded, arithmetic, [])
    seed_random_layers(seed)
    with evaluation_mode(twin):
        outputs = recorded.called(twin, given, arithmetic)
        return _own(named.of(outputs, "eval")), _left(given, recorded, "eval")


def _left(given: tuple[tuple, dict], recorded: Recorded, mode: str) -> dict[str, Tensor]:
    """The inputs of a whole network after its call: inside one, who writes into what is its own affair."""
    if recorded.loss is None:
        return {}
    tensors = (t for t in tensors_in(given) if not t.is_complex())
    return {f"{mode} {i}": t.detach().clone() for i, t in enumerate(tensors)}


def _updated_pass(
    twin: nn.Module,
    recorded: Recorded,
    arithmetic: str,
    seed: int,
    named: Named,
    optimizer: Callable[[nn.Module], Optimizer],
) -> dict[str, Tensor]:
    theirs(theirs(optimizer, twin).step)
    given = own_inputs(recorded, arithmetic)
    seed_random_layers(seed)
    return _own(named.of(recorded.called(twin, given, arithmetic), "update"))


def fresh_inputs(recorded: Recorded, arithmetic: str, leaves: list[Tensor]) -> tuple[tuple, dict]:
    """The arguments in the arithmetic, leaves of their own; those that take a gradient go into ``leaves``."""
    dtype = torch.float64 if arithmetic.endswith("64") else None

    def fresh(tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            new = tensor.detach().clone()
            new = new.to(dtype) if dtype and new.is_floating_point() else new
        new = shadow(new) if arithmetic.startswith("shadow") else new
        if tensor.requires_grad:
            leaves.append(new.requires_grad_())
        return new

    return each_tensor(fresh, (recorded.args, recorded.kwargs))


def own_copies(values: object) -> object:
    """A network may write into what it is given, and leaves must not be written into."""
    return each_tensor(lambda t: t.clone() if t.requires_grad else t, values)


def own_inputs(
    recorded: Recorded, arithmetic: str = "float32", leaves: list[Tensor] | None = None
) -> tuple[tuple, dict]:
    """``fresh_inputs`` ready to be handed over: a network may write into what it is given."""
    return own_copies(fresh_inputs(recorded, arithmetic, [] if leaves is None else leaves))


def _backward(named: Mapping[str, Tensor], recorded: Recorded, arithmetic: str) -> None:
    pairs = [
        (named[name], g)
        for name, g in recorded.gradients.items()
        if g is not None and name in named and named[name].requires_grad and named[name].shape == g.shape
    ]
    if pairs:
        # the sum's gradient is the numbers themselves; handing them to autograd imports sympy, a second and
        # more
        sum((o * _like(g, o, arithmetic)).sum() for o, g in pairs).backward()


def _like(gradient: Tensor, output: Tensor, arithmetic: str) -> Tensor:
    with _disable_current_modes():
        gradient = gradient.detach().clone()
    if arithmetic.startswith("shadow"):
        return shadow(gradient.to(output.dtype) if output.dtype.itemsize >= 4 else gradient)
    return gradient.to(output.dtype)


def _own(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in named.items()}


def whole_network(
    call: Callable, loss: Callable, inputs: object, targets: object, precision: Precision = FLOAT32
) -> Recorded:
    """What a whole network is given: one batch and its loss, where the network has none of its own."""

    def measured(network: nn.Module, outputs: object, arithmetic: str) -> Tensor:
        def values(of: object) -> object:
            of = cast(of, torch.float64) if arithmetic.endswith("64") else of
            return shadow(of) if arithmetic.startswith("shadow") else of

        with _disable_current_modes():
            own = loss_in(loss_of(network, loss), lambda module: in_arithmetic(module, arithmetic), values)
        return one_number(theirs(own, outputs, values(targets)))

    by = {"call": lambda module, args, _: call(module, args[0]), "precision": precision}
    return Recorded((inputs,), loss=measured, **by)


def on_batch(pair: Pair, batch: tuple[object, object]) -> Recorded:
    """What both networks are given, in the dtype of their precision; without a loss nothing is sent back."""
    if pair.loss is None:
        return forward_alone(pair, batch[0])
    return whole_network(pair.call, pair.loss, *cast(tuple(batch), pair.precision.dtype), pair.precision)


def forward_alone(pair: Pair, inputs: object) -> Recorded:
    """The inputs of a batch, for which nothing is sent back."""
    by = {"call": lambda module, args, _: pair.call(module, args[0]), "precision": pair.precision}
    return Recorded((cast(inputs, pair.precision.dtype),), **by)
