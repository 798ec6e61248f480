"""A padded encoder with the norms of BERT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.real_bugs._networks import LENGTH, VOCABULARY, WIDTH
from bench.tasks import _classes, _task


class MeanPool(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask[..., None].to(x.dtype)
        return (x * mask).sum(1) / mask.sum(1)


class Encoder(nn.Module):
    """Padded tokens [N, T] and their mask -> logits [N, 4]: learned positions, a mean over the tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2))
        self.mix, self.act, self.fc = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)
        self.pool = MeanPool()
        with torch.no_grad():  # as BERT begins: what the first norm sees is small
            self.embed.weight.mul_(0.02)
            self.position.weight.mul_(0.02)

    def places(self, mask: Tensor) -> Tensor:
        return (mask.long().cumsum(1) - 1).clamp(min=0)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(self.embed(tokens) + self.position(self.places(mask)))
        x = self.norm2(x + self.act(self.mix(x)))
        return self.fc(self.pool(x, mask))


def _left_padded() -> tuple[dict, Tensor]:
    lengths = torch.randint(4, LENGTH + 1, (8, 1))
    mask = torch.arange(LENGTH) >= LENGTH - lengths
    return {"tokens": torch.randint(VOCABULARY, (8, LENGTH)) * mask, "mask": mask}, _classes(8, 4)


encoder = _task("encoder", Encoder, _left_padded)
