"""Candidates that torch's own tools made of the reference or of a port."""

from __future__ import annotations

import torch
from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._tables_exported import Called, Exported, regressor, signal, without_modules
from bench.ported._tables_rows import FeatureTransformer, tokens
from bench.ported._vision_shapes import mixer


@case(SAME, "scripted", mixer)
def mixer_scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


@case(SAME, "traced", tokens)
def tokens_traced(model: nn.Module) -> nn.Module:
    port = FeatureTransformer(model)
    return torch.jit.trace(port, torch.zeros(8, 6).to(port.top.weight))


@case(SAME, "exported", signal)
def signal_exported(model: nn.Module) -> nn.Module:
    example = torch.zeros(8, 3, 24).to(model.fc.weight)
    batch = {0: torch.export.Dim("batch", max=1024)}
    return Exported(torch.export.export(model, (example,), dynamic_shapes=(batch,)).module())


@case(SAME, "graph transformed", regressor)
def regressor_of_functions(model: nn.Module) -> nn.Module:
    return without_modules(model)


@case("bug", "traced in eval", regressor, module=("norm1", "norm2"))
def regressor_traced_in_eval(model: nn.Module, right: bool = False) -> nn.Module:
    """The network was traced in eval mode, so that its norms take the stored statistics in training too."""
    if right:
        return torch.jit.script(model)
    return torch.jit.trace(model.eval(), torch.zeros(8, 10).to(model.out.weight)).train()


@case("bug", "buffers not stored", regressor, module=("norm1", "norm2"), passes="buffer")
def regressor_called_with_copies(model: nn.Module, right: bool = False) -> nn.Module:
    """The functional call gets copies of the buffers: the running statistics are updated and lost."""
    return Called(model, stored=right)
