"""Right pairs out of torch's ways to run and train a network: fx, export, compile, checkpoints, foreach."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from bench.optimizers import of
from bench.real_bugs.right_torch import pair
from bench.tasks import TransformerBlock, cnn, dropout_transformer, mlp, transformer, two_inputs


@pair(mlp)
def mlp_traced(model: nn.Module) -> nn.Module:
    return fx.symbolic_trace(model)


@pair(two_inputs)
def two_inputs_traced(model: nn.Module) -> nn.Module:
    return fx.symbolic_trace(model)


@pair(mlp)
def mlp_exported(model: nn.Module) -> nn.Module:
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(model, (torch.randn(17, 20),), dynamic_shapes=({0: batch},)).module()


@pair(transformer)
def transformer_exported(model: nn.Module) -> nn.Module:
    batch = torch.export.Dim("batch", min=2)
    tokens = torch.zeros(6, 11, dtype=torch.long)
    return torch.export.export(model, (tokens,), dynamic_shapes=({0: batch},)).module()


@pair(mlp)
def mlp_compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


@pair(transformer)
def transformer_compiled_by_aot_eager(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


@pair(cnn)
def cnn_compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


@pair(mlp)
def mlp_scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


class Checkpointed(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@pair(transformer)
def blocks_checkpointed(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.__class__ = Checkpointed
    return model


@pair(dropout_transformer)
def blocks_with_dropout_checkpointed(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.__class__ = Checkpointed
    return model


@pair(transformer)
def blocks_checkpointed_reentrantly(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.__class__ = Reentrant
    return model


class ASampleAtATime(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return vmap(self.model)(x)


@pair(mlp)
def mlp_by_vmap(model: nn.Module) -> nn.Module:
    return ASampleAtATime(model)


class Called(nn.Module):
    """By torch.func.functional_call, with its own parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.model, dict(self.model.named_parameters()), (x,))


@pair(transformer)
def transformer_by_functional_call(model: nn.Module) -> nn.Module:
    return Called(model)


OPTIMIZERS = (
    ("adam_by_foreach", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}, "foreach", mlp),
    ("adamw_fused", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, "fused", mlp),
    ("sgd_fused", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "fused", cnn),
    (
        "sgd_by_foreach",
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
        "foreach",
        transformer,
    ),
    ("rmsprop_by_foreach", torch.optim.RMSprop, {"lr": 1e-3, "centered": True}, "foreach", mlp),
    ("adagrad_fused", torch.optim.Adagrad, {"lr": 1e-2}, "fused", mlp),
    ("nadam_by_foreach", torch.optim.NAdam, {"lr": 1e-2}, "foreach", mlp),
)

for _name, _kind, _settings, _way, _on in OPTIMIZERS:

    def _same(model: nn.Module) -> nn.Module:
        return model

    _same.__name__ = _name
    _plainly = partial(_kind, **_settings, foreach=False)
    _otherwise = of(partial(_kind, **_settings, **{_way: True}))
    pair(_on, optimizer=_plainly, candidate_optimizer=_otherwise)(_same)
