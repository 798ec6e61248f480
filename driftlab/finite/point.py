"""A loss as a function of all numbers that it is differentiated by, in float64, around one point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.arithmetic.kinks import KinkSides, kink_sides, nodes
from driftlab.blame import described, theirs
from driftlab.finite.narrow import narrow_dtype
from driftlab.finite.widening import input_leaves, widened_copy
from driftlab.fold.layout import gradient_of
from driftlab.network.calling import calling, seed_random_layers
from driftlab.network.compiled import eager
from driftlab.network.loss import one_number
from driftlab.words import DiagnoseError

Loss = Callable[[object], Tensor]
Move = Mapping[str, Tensor]  # of some leaves, in their shapes


class Point:
    """The parameters and inputs of a network, and its loss wherever they are moved to.

    Every evaluation starts from the same buffers and the same state of the random layers.

    Args:
        inputs: as ``diagnose`` takes them. Those that require gradients are leaves; all floating ones where
            none does.
        loss: of the network's outputs, a scalar; a module's own parameters are leaves too.

    Attributes:
        leaves: name -> what the loss is differentiated by: "input" (or "input.0", "input.mask"), then the
            parameters in their order, then those of the loss.
        evaluations: how many forward passes were made.
        complaint: what the network raised beside the point, where it did.

    Raises:
        DiagnoseError: there is nothing to differentiate by, or the loss is no number.
    """

    def __init__(self, module: nn.Module, inputs: object, loss: Loss, seed: int):
        self.module = widened_copy(module)
        self.loss = widened_copy(loss) if isinstance(loss, nn.Module) else loss
        self.call, self.seed, self.evaluations = calling(module, inputs), seed, 0
        self.complaint: str | None = None
        parameters = dict(self._parameters())
        self.inputs, named = input_leaves(inputs, parameters)
        self.leaves: dict[str, Tensor] = named | parameters
        if not self.leaves:
            raise DiagnoseError("nothing requires a gradient: no parameter does, and no input is floating")
        self.base = {n: t.detach().clone() for n, t in self.leaves.items()}
        self.movable = {n: t.isfinite() for n, t in self.base.items()}
        self._leave_padding()
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for part in self._parts()
            for owner in part.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def gradient(self) -> dict[str, Tensor]:
        """Autograd's, dense, zero where it gives none."""
        self._place({})
        for leaf in self.leaves.values():
            leaf.grad = None
        self._backward(self._forward())
        found = {}
        for name, leaf in self.leaves.items():
            found[name] = gradient_of(leaf).detach().clone()
            leaf.grad = None
        return found

    def _backward(self, loss: Tensor) -> None:
        """Into the leaves alone: a function may close over a network whose gradients are its owner's."""
        if all(node.name() != "CheckpointFunctionBackward" for node in nodes(loss.grad_fn)):
            return loss.backward(inputs=list(self.leaves.values()))
        # a reentrant checkpoint takes no list of inputs: what others have is put back
        variables = [v for node in nodes(loss.grad_fn) if (v := getattr(node, "variable", None)) is not None]
        kept = [(v, v.grad) for v in variables]
        for variable in variables:
            variable.grad = None
        loss.backward()
        own = {id(leaf) for leaf in self.leaves.values()}
        for variable, grad in kept:
            variable.grad = variable.grad if id(variable) in own else grad

    def start(self) -> float:
        """The loss at the base."""
        self._place({})
        return self._forward().item()

    def at(self, move: Move) -> tuple[float, dict[str, Tensor], KinkSides | None]:
        """The loss at the base moved by ``move``, how far each leaf really went, and the sides of the kinks.

        A number that is moved is rounded; what it really moved by is what the gradient has to answer for. The
        loss is NaN, with no sides, where the network does not run there.
        """
        moved = self._place(move)
        try:
            loss = self._forward()
        except Exception as error:  # a domain that ends beside the point
            self.complaint = described(error)
            return math.nan, moved, None
        return loss.item(), moved, kink_sides(loss)

    def settle(self, move: Move) -> None:
        """Make the moved point the base."""
        self._place(move)
        self.base = {n: t.detach().clone() for n, t in self.leaves.items()}

    def narrow(self) -> torch.dtype | None:
        """A dtype of fewer bits in which something on the way to the loss is computed; None where none is."""
        self._place({})
        return narrow_dtype(self._forward)

    def _parts(self) -> list[nn.Module]:
        return [part for part in (self.module, self.loss) if isinstance(part, nn.Module)]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in zip(("", "loss."), self._parts(), strict=False):
            yield from ((prefix + n, p) for n, p in part.named_parameters() if p.requires_grad)

    def _leave_padding(self) -> None:
        """The row that pads an embedding gets no gradient, by design."""
        rows = {id(m.weight): m.padding_idx for m in self.module.modules() if isinstance(m, nn.Embedding)}
        for name, leaf in self.leaves.items():
            if rows.get(id(leaf)) is not None:
                self.movable[name][rows[id(leaf)]] = False

    @torch.no_grad()
    def _place(self, move: Move) -> dict[str, Tensor]:
        moved = {}
        for name, leaf in self.leaves.items():
            leaf.copy_(self.base[name] + move[name] if name in move else self.base[name])
            if name in move:  # what is not finite stays where it is
                moved[name] = torch.where(self.movable[name], leaf - self.base[name], 0.0)
        return moved

    def _forward(self) -> Tensor:
        self.evaluations += 1
        with torch.no_grad():
            for owner, name, buffer, kept in self._buffers:
                if buffer.shape == kept.shape:
                    buffer.copy_(kept)
                if getattr(owner, name, None) is not buffer:  # the network has put another in its place
                    setattr(owner, name, buffer)
        seed_random_layers(self.seed)
        # copies, since a network may write into what it is given, which no leaf allows
        inputs = pytree.tree_map_only(Tensor, lambda t: t.clone(), self.inputs)
        with eager():
            return one_number(theirs(self.loss, self.call(self.module, inputs)))


def random_direction(point: Point, generator: torch.Generator) -> dict[str, Tensor]:
    """Every number of every leaf moves by between half and one and a half of the leaf's typical size.

    No number stands still, so that one wrong element shows; sizes differ, so that two wrong ones do not
    cancel. What is infinite, and the row that pads an embedding, stays.
    """
    typical = {n: _typical(t[point.movable[n]]) for n, t in point.base.items()}
    others = sorted(s for s in typical.values() if s)
    fallback = others[len(others) // 2] if others else 1.0
    signed = {n: _signed(t, generator) * (typical[n] or fallback) for n, t in point.base.items()}
    return {n: torch.where(point.movable[n], v, 0.0) for n, v in signed.items()}


def _typical(numbers: Tensor) -> float:
    most = float(numbers.abs().max()) if numbers.numel() else 0.0
    return most * float((numbers / most).abs().square().mean().sqrt()) if most else 0.0


def _signed(like: Tensor, generator: torch.Generator) -> Tensor:
    def drawn() -> Tensor:
        # on the CPU, as its generator is, whatever the default device
        sizes = 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        signs = 2.0 * torch.randint(0, 2, like.shape, generator=generator, device="cpu") - 1
        return (sizes * signs).to(like.device)

    return torch.complex(drawn(), drawn()) if like.is_complex() else drawn()
