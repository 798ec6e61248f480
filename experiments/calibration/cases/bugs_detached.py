"""Gradients that get lost on the way: residuals, states, embeddings, dropout; the forward pass is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import ManualLSTM, recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import (
    Recurrent,
    TransformerBlock,
    dropout_transformer,
    recurrent,
    resnet,
    transformer,
)
from models.resnet import BasicBlock


class ShortcutDetached(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(residual + self.shortcut(x).detach())


@case("bug", "residual detached", resnet, module="layer3.1", passes="input gradient")
def shortcut_detached(model):
    """No gradient flows through the shortcut, as with a checkpoint that saves a detached input."""
    return recast(model, "layer3.1", ShortcutDetached)


class ResidualDetached(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@case("bug", "residual detached", transformer, module="blocks.1", passes="input gradient")
def attention_residual_detached(model):
    """No gradient flows past the attention."""
    return recast(model, "blocks.1", ResidualDetached)


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


class CellDetached(ManualLSTM):
    def update(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return super().update(x, h, c.detach())


@case("bug", "state detached", recurrent, module="lstm", passes=("input gradient", "weight gradient"))
def lstm_cell_detached(model):
    """The cell state is detached at each time step."""
    return recast(model, "lstm", CellDetached)


class StateDetached(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        h = x.new_zeros(x.shape[0], 10)
        for t in range(states.shape[1]):
            h = self.cell(states[:, t], h.detach())
        return self.fc(h)


@case("bug", "state detached", recurrent, module="", passes=("input gradient", "weight gradient"))
def gru_state_detached(model):
    """The network detaches the state that it hands on: truncated to one step."""
    return recast(model, "", StateDetached)


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


class DropoutByHand(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return DropoutFunction.apply(x, self.p) if self.training else x


@case(
    "bug", "dropout backward unscaled", dropout_transformer, module="blocks.0.drop", passes="input gradient"
)
def dropout_backward_without_scale(model):
    """The mask is kept for the backward pass, its scale is not."""
    return recast(model, "blocks.0.drop", DropoutByHand)
