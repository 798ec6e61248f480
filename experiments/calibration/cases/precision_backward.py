"""Reduced precision in the backward pass or the update: saved tensors, gradients, optimizer state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer


class LeanLinear(Function):
    """A linear layer that keeps its input in bfloat16 for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.t() @ x.flatten(0, -2).to(grad.dtype), rows.sum(0)


class LeanGELU(Function):
    """GELU that keeps its input in bfloat16 for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16())
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x.to(grad.dtype))


class LeanConv(Function):
    """A conv without bias that keeps its input in float16 for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stride, padding) -> Tensor:
        ctx.save_for_backward(x.half(), weight)
        ctx.how = {"stride": stride, "padding": padding}
        return F.conv2d(x, weight, **ctx.how)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = torch.nn.grad.conv2d_input(x.shape, weight, grad, **ctx.how)
        grad_weight = torch.nn.grad.conv2d_weight(x.to(grad.dtype), weight.shape, grad, **ctx.how)
        return grad_x, grad_weight, None, None


class HalfWeightGradient(Function):
    """A linear layer whose weight gradient alone is a product of float16 matrices."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return grad @ weight, (grad.half().t() @ x.half()).to(grad.dtype), grad.sum(0)


class RoundGradient(Function):
    """The identity; its gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.bfloat16().to(grad.dtype)


class BFloat16MomentumSGD(torch.optim.Optimizer):
    """SGD with momentum whose momentum buffers are kept in bfloat16 to halve their memory."""

    def __init__(self, params, lr: float, momentum: float):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].get("momentum_buffer", torch.zeros_like(p))
                buffer = (group["momentum"] * buffer.to(p.dtype) + p.grad).bfloat16()
                self.state[p]["momentum_buffer"] = buffer
                p.sub_(buffer.to(p.dtype), alpha=group["lr"])


@case("reduced_precision", "saved in half", transformer, module="blocks.0.up", passes="weight gradient")
def linear_input_saved_in_bfloat16(model):
    """The forward pass is exact; the weight gradient sees a bfloat16 copy of the input."""

    class Linear(nn.Linear):
        def forward(self, x):
            return LeanLinear.apply(x, self.weight, self.bias)

    return recast(model, "blocks.0.up", Linear)


@case("reduced_precision", "saved in half", transformer, module="blocks.1.act", passes="input gradient")
def gelu_input_saved_in_bfloat16(model):
    """GELU's derivative is taken at a bfloat16 copy of its input."""

    class GELU(nn.GELU):
        def forward(self, x):
            return LeanGELU.apply(x)

    return recast(model, "blocks.1.act", GELU)


@case("reduced_precision", "saved in half", resnet, module="layer2.0.conv1", passes="weight gradient")
def conv_input_saved_in_float16(model):
    """A strided conv's weight gradient sees a float16 copy of its input."""

    class Conv(nn.Conv2d):
        def forward(self, x):
            return LeanConv.apply(x, self.weight, self.stride, self.padding)

    return recast(model, "layer2.0.conv1", Conv)


@case(
    "reduced_precision",
    "rounded gradient",
    autoencoder,
    module="down2",
    passes=("input gradient", "weight gradient"),
)
def output_gradient_rounded_by_a_hook(model):
    """A tensor hook rounds the gradient of the conv's output to bfloat16, before either product."""

    class Conv(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad.bfloat16().to(grad.dtype))
            return y

    return recast(model, "down2", Conv)


@case("reduced_precision", "rounded gradient", cnn, module="conv2", passes="input gradient")
def input_gradient_rounded_by_a_module_hook(model):
    """A full backward hook rounds the gradient that the conv hands back."""

    def halve(module, grad_inputs, grad_outputs):
        return tuple(None if grad is None else grad.bfloat16().to(grad.dtype) for grad in grad_inputs)

    model.conv2.register_full_backward_hook(halve)
    return model


@case("reduced_precision", "half weight gradient", mlp, module="fc2", passes="weight gradient")
def weight_gradient_product_in_float16(model):
    """The weight gradient alone is computed in float16."""

    class Linear(nn.Linear):
        def forward(self, x):
            return HalfWeightGradient.apply(x, self.weight, self.bias)

    return recast(model, "fc2", Linear)


@case("reduced_precision", "half weight gradient", recurrent, module="fc", passes="weight gradient")
def compressed_weight_gradient(model):
    """Weight and bias gradients go through bfloat16, as a gradient compressed for all-reduce does."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(x, RoundGradient.apply(self.weight), RoundGradient.apply(self.bias))

    return recast(model, "fc", Linear)


@case(
    "reduced_precision",
    "half optimizer state",
    mlp,
    module=("", "fc1", "fc2", "fc3"),
    passes="update",
    candidate_optimizer=lambda net: BFloat16MomentumSGD(net.parameters(), lr=0.1, momentum=0.9),
)
def momentum_kept_in_bfloat16(model):
    """The network is the reference; its optimizer keeps the momentum in bfloat16."""
    return model
