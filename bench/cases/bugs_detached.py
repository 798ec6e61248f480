"""Gradients that get lost on the way: residuals, states, embeddings, dropout; the forward pass is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS, case, method_of
from bench.cases._bug_parts import ManualLSTM
from bench.surgery import replace
from bench.tasks import dropout_transformer, recurrent, resnet, transformer


@method_of("layer3.1", "bug", "residual detached", resnet, passes="input gradient")
def shortcut_detached(self, x: Tensor) -> Tensor:
    """No gradient flows through the shortcut, as with a checkpoint that saves a detached input."""
    residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
    return self.act2(residual + self.shortcut(x).detach())


@method_of("blocks.1", "bug", "residual detached", transformer, passes="input gradient")
def attention_residual_detached(self, x: Tensor) -> Tensor:
    """No gradient flows past the attention."""
    x = x.detach() + self.attention(self.norm1(x))
    return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@case("bug", "embedding rows without gradient", transformer, module="embed", passes="weight gradient")
def padding_index_of_a_real_token(model):
    """Token 1 is an ordinary token, but the new embedding takes it for padding, as RoBERTa's does."""
    embed = nn.Embedding(29, 24, padding_idx=1)
    embed.weight = model.head.weight
    return replace(model, "embed", embed)


@case("bug", "gradient divided by frequency", transformer, module="embed", passes="weight gradient")
def embedding_gradient_by_frequency(model):
    """The gradient of a token is divided by how often it occurs."""
    embed = nn.Embedding(29, 24, scale_grad_by_freq=True)
    embed.weight = model.head.weight
    return replace(model, "embed", embed)


@method_of("lstm", "bug", "state detached", recurrent, "update", ManualLSTM, passes=GRADIENTS)
def lstm_cell_detached(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The cell state is detached at each time step."""
    return ManualLSTM.update(self, x, h, c.detach())


@method_of("", "bug", "state detached", recurrent, "step", passes=GRADIENTS)
def gru_state_detached(self, state: Tensor, h: Tensor) -> Tensor:
    """The network detaches the state that it hands on: truncated to one step."""
    return self.cell(state, h.detach())


class DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        mask = F.dropout(torch.ones_like(x), p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (mask,) = ctx.saved_tensors
        return gradient * (mask > 0), None  # lacks 1 / (1 - p)


@method_of("blocks.0.drop", "bug", "dropout backward unscaled", dropout_transformer, passes="input gradient")
def dropout_backward_without_scale(self, x: Tensor) -> Tensor:
    """The mask is kept for the backward pass, its scale is not."""
    return DropoutFunction.apply(x, self.p) if self.training else x
