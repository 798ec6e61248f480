"""Reduced precision in the backward pass or the update: saved tensors, gradients, optimizer state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import Backward, own_backward
from bench.case import GRADIENTS, case, method_of
from bench.optimizers import ByHand, of
from bench.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer


def rounded(grad: Tensor) -> Tensor:
    """Through bfloat16 and back."""
    return grad.bfloat16().to(grad.dtype)


class BFloat16MomentumSGD(ByHand):
    """SGD with momentum whose momentum buffers are kept in bfloat16 to halve their memory."""

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        buffer = state.get("momentum_buffer", torch.zeros_like(p))
        state["momentum_buffer"] = (group["momentum"] * buffer.to(p.dtype) + grad).bfloat16()
        p.sub_(state["momentum_buffer"].to(p.dtype), alpha=group["lr"])


@method_of("blocks.0.up", "reduced_precision", "saved in half", transformer, passes="weight gradient")
def linear_input_saved_in_bfloat16(self, x):
    """The forward pass is exact; the weight gradient sees a bfloat16 copy of the input."""

    def backward(grad, x, weight, bias):
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.t() @ x.bfloat16().flatten(0, -2).to(grad.dtype), rows.sum(0)

    return own_backward(F.linear, backward)(x, self.weight, self.bias)


@method_of("blocks.1.act", "reduced_precision", "saved in half", transformer, passes="input gradient")
def gelu_input_saved_in_bfloat16(self, x):
    """GELU's derivative is taken at a bfloat16 copy of its input."""
    return own_backward(F.gelu, lambda g, x: torch.ops.aten.gelu_backward(g, x.bfloat16().to(g.dtype)))(x)


@method_of("layer2.0.conv1", "reduced_precision", "saved in half", resnet, passes="weight gradient")
def conv_input_saved_in_float16(self, x):
    """A strided conv's weight gradient sees a float16 copy of its input."""
    how = {"stride": self.stride, "padding": self.padding}

    def backward(grad, x, weight):
        saved = x.half().to(grad.dtype)
        grad_x = torch.nn.grad.conv2d_input(x.shape, weight, grad, **how)
        return grad_x, torch.nn.grad.conv2d_weight(saved, weight.shape, grad, **how)

    return own_backward(lambda x, weight: F.conv2d(x, weight, **how), backward)(x, self.weight)


@method_of("down2", "reduced_precision", "rounded gradient", autoencoder, passes=GRADIENTS)
def output_gradient_rounded_by_a_hook(self, x):
    """A tensor hook rounds the gradient of the conv's output to bfloat16, before either product."""
    y = nn.Conv2d.forward(self, x)
    if y.requires_grad:
        y.register_hook(rounded)
    return y


@case("reduced_precision", "rounded gradient", cnn, module="conv2", passes="input gradient")
def input_gradient_rounded_by_a_module_hook(model):
    """A full backward hook rounds the gradient that the conv hands back."""

    def halve(module, grad_inputs, grad_outputs):
        return tuple(None if grad is None else rounded(grad) for grad in grad_inputs)

    model.conv2.register_full_backward_hook(halve)
    return model


@method_of("fc2", "reduced_precision", "half weight gradient", mlp, passes="weight gradient")
def weight_gradient_product_in_float16(self, x):
    """The weight gradient alone is computed in float16."""

    def backward(grad, x, weight, bias):
        return grad @ weight, (grad.half().t() @ x.half()).to(grad.dtype), grad.sum(0)

    return own_backward(F.linear, backward)(x, self.weight, self.bias)


@method_of("fc", "reduced_precision", "half weight gradient", recurrent, passes="weight gradient")
def compressed_weight_gradient(self, x):
    """Weight and bias gradients go through bfloat16, as a gradient compressed for all-reduce does."""
    return F.linear(x, Backward.apply(self.weight, rounded), Backward.apply(self.bias, rounded))


MOMENTUM = {
    "module": ("", "fc1", "fc2", "fc3"),
    "candidate_optimizer": of(BFloat16MomentumSGD, lr=0.1, momentum=0.9),
}


@case("reduced_precision", "half optimizer state", mlp, passes="update", **MOMENTUM)
def momentum_kept_in_bfloat16(model):
    """The network is the reference; its optimizer keeps the momentum in bfloat16."""
    return model
