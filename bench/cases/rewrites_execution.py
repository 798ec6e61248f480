"""True rewrites of how a network is run: checkpointing, in place, hooks, TorchScript, own backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.backward import own_backward
from bench.case import case, in_place_of, method_of
from bench.cases._rewritten import SAME, ConvWeights, LinearWeights, rewritten
from bench.cases.rewrites_gru import HandGRUCell
from bench.tasks import autoencoder, cnn, dropout_transformer, mlp, recurrent, resnet


class Checkpointed(nn.Module):
    """The forward of ``block`` is run again in the backward pass, with the same random numbers."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Compiled(nn.Module):
    """A TorchScript module; its own deep copy has parameters that are no leaves."""

    def __init__(self, scripted: nn.Module):
        super().__init__()
        self.scripted = scripted

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.scripted(*inputs)

    def __deepcopy__(self, memo: dict) -> Compiled:
        with torch.no_grad():
            scripted = copy.deepcopy(self.scripted, memo)
        for new, old in zip(scripted.parameters(), self.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        return Compiled(scripted).train(self.training)


def _compiled(make: Callable, *arguments: object) -> Compiled:
    """By ``torch.jit``, whose advice to move to ``torch.compile`` is not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Compiled(make(*arguments))


@case("bit_identical", "checkpointing", on=dropout_transformer)
def blocks_checkpointed(model: nn.Module) -> nn.Module:
    """``torch.utils.checkpoint`` on every block; dropout draws the same masks twice."""
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


@case("bit_identical", "checkpointing", on=autoencoder)
def conv_checkpointed(model: nn.Module) -> nn.Module:
    """``torch.utils.checkpoint`` on one transposed conv."""
    return rewritten(model, "up1", Checkpointed)


@case("bit_identical", "activation in place", on=resnet)
def relu_in_place(model: nn.Module) -> nn.Module:
    """Every ReLU writes over its input."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return model


@in_place_of("fc2", SAME, "own backward", mlp, "linear_with_own_backward")
class OwnLinear(LinearWeights):
    """An ``autograd.Function`` for the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        def backward(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            return gradient.mm(weight), gradient.t().mm(x), gradient.sum(0)

        return own_backward(lambda x, w, b: x.mm(w.t()) + b, backward)(x, self.weight, self.bias)


@method_of(("act1", "act3"), SAME, "own backward", autoencoder, base=nn.Module)
def silu_with_own_backward(self, x: Tensor) -> Tensor:
    """An ``autograd.Function`` that keeps only the input and computes the sigmoid again."""

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))

    return own_backward(lambda x: x * torch.sigmoid(x), backward)(x)


@in_place_of("layer1.0.conv2", SAME, "own backward", resnet, "conv_with_own_backward")
class OwnConv(ConvWeights):
    """The input gradient is a conv with the flipped kernel, the weight's an im2col product."""

    def forward(self, x: Tensor) -> Tensor:
        def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            columns = F.unfold(x, 3, padding=1)
            of_weight = torch.einsum("nop,ncp->oc", gradient.flatten(2), columns).view_as(weight)
            return F.conv2d(gradient, weight.flip(2, 3).transpose(0, 1), padding=1), of_weight

        return own_backward(lambda x, weight: F.conv2d(x, weight, padding=1), backward)(x, self.weight)


@case(SAME, "TorchScript", on=recurrent)
def gru_cell_scripted(model: nn.Module) -> nn.Module:
    """``torch.jit.script`` of a GRU cell written out."""
    return rewritten(model, "cell", lambda cell: _compiled(torch.jit.script, HandGRUCell(cell)))


@case(SAME, "TorchScript", on=mlp)
def linear_traced(model: nn.Module) -> nn.Module:
    """``torch.jit.trace`` of the second layer."""
    return rewritten(model, "fc2", lambda linear: _compiled(torch.jit.trace, linear, torch.zeros(3, 48)))


@case("bit_identical", "gradient hook", on=cnn)
def backward_hook_returns_its_gradient(model: nn.Module) -> nn.Module:
    """A full backward hook on a conv returns the gradient it was given."""
    model.conv2.register_full_backward_hook(lambda module, grad_input, grad_output: grad_input)
    return model


@in_place_of("fc2", "bit_identical", "gradient hook", mlp, "tensor_hook_returns_its_gradient")
class WatchedGradient(nn.Module):
    """A hook on the hidden tensor notes the norm of its gradient."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.largest = 0.0

    def _look(self, gradient: Tensor) -> Tensor:
        self.largest = max(self.largest, gradient.norm().item())
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._look)
        return self.module(x)
