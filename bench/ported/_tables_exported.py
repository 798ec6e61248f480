"""Candidates that a tool made: scripted, traced, exported, transformed, called as functions."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bench.tasks import _classes, _task


class Regressor(nn.Module):
    """[N, 10] -> [N, 4]: residual layers with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(10, 24)
        self.norm1, self.norm2 = nn.BatchNorm1d(24), nn.BatchNorm1d(24)
        self.fc1, self.fc2 = nn.Linear(24, 24), nn.Linear(24, 24)
        self.act = nn.SiLU()
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + self.fc1(self.act(self.norm1(x)))
        x = x + self.fc2(self.act(self.norm2(x)))
        return self.out(x)


regressor = _task("ported_regressor", Regressor, lambda: (torch.randn(8, 10), torch.randn(8, 4)), F.mse_loss)


class Signal(nn.Module):
    """[N, 3, 24] -> [N, 5]: 1-D convs with GroupNorm, which is the same in both modes."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(3, 16, 5, padding=2), nn.GroupNorm(4, 16)
        self.conv2, self.norm2 = nn.Conv1d(16, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.conv1(x)))
        x = F.gelu(self.norm2(self.conv2(x)))
        return self.fc(x.mean(2))


signal = _task("ported_signal", Signal, lambda: (torch.randn(8, 3, 24), _classes(8, 5)))


def without_modules(model: nn.Module) -> fx.GraphModule:
    """The traced graph with functions for linear layers and activations, and in-place sums."""
    traced = fx.symbolic_trace(model)
    for node in list(traced.graph.nodes):
        if node.op == "call_module":
            layer = traced.get_submodule(node.target)
            with traced.graph.inserting_before(node):
                if isinstance(layer, nn.Linear):
                    weights = [traced.graph.get_attr(f"{node.target}.{part}") for part in ("weight", "bias")]
                    new = traced.graph.call_function(F.linear, (node.args[0], *weights))
                elif isinstance(layer, nn.SiLU):
                    new = traced.graph.call_function(F.silu, node.args)
                else:
                    continue
        elif node.op == "call_function" and node.target is operator.add:
            with traced.graph.inserting_before(node):
                new = traced.graph.call_function(torch.add, node.args)
        else:
            continue
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


class Called(nn.Module):
    """Holds another network's weights and buffers by flat names, and calls it as a function of them."""

    def __init__(self, model: nn.Module, stored: bool):
        super().__init__()
        self.skeleton = (model,)  # a tuple, so that its weights are not registered again
        self.stored = stored
        for name, weight in model.named_parameters():
            self.register_parameter(name.replace(".", "__"), nn.Parameter(weight.detach().clone()))
        for name, buffer in model.named_buffers():
            self.register_buffer(name.replace(".", "__"), buffer.clone())

    def forward(self, x: Tensor) -> Tensor:
        values = {name.replace("__", "."): value for name, value in self.named_parameters()}
        for name, buffer in self.named_buffers():
            values[name.replace("__", ".")] = buffer if self.stored else buffer.clone()
        model = self.skeleton[0].train(self.training)
        return torch.func.functional_call(model, values, (x,))


class Exported(nn.Module):
    """An exported network; the exported module refuses train and eval, which change nothing in it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def train(self, mode: bool = True) -> nn.Module:
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)
