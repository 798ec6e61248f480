"""A forecaster in the manner of PatchTST, small: attention over patches between batch norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import text_task
from bench.ported._text_towers import WIDTH, ClipAttention


class SeriesLayer(nn.Module):
    """PatchTST's: batch norms over the features, after each sum."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.batchnorm1, self.batchnorm2 = (
            ClipAttention(),
            *(nn.BatchNorm1d(WIDTH) for _ in range(2)),
        )
        self.ff = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.batchnorm1((x + self.self_attn(x, None)).mT).mT
        return self.batchnorm2((x + self.ff(x)).mT).mT


class Series(nn.Module):
    """[N, 24] in patches of 4 -> [N, 4], what comes next."""

    def __init__(self):
        super().__init__()
        self.input_embedding = nn.Linear(4, WIDTH)
        self.position_enc = nn.Parameter(0.2 * torch.randn(6, WIDTH))
        self.layers, self.head = nn.ModuleList(SeriesLayer() for _ in range(2)), nn.Linear(6 * WIDTH, 4)

    def forward(self, past_values: Tensor) -> Tensor:
        x = self.input_embedding(past_values.unfold(1, 4, 4)) + self.position_enc
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))


def _series() -> tuple[Tensor, Tensor]:
    values = torch.randn(6, 28).cumsum(1) / 3
    return values[:, :24], values[:, 24:]


series = text_task("patchtst_small", Series, _series, lambda outputs, targets: F.mse_loss(outputs, targets))
