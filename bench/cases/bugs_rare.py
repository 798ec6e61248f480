"""Faults that need a rare input: large values, an odd or a single sample, a row of zeros."""

from __future__ import annotations

from dataclasses import replace as with_

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.tasks import Task, autoencoder, cnn, mlp, resnet, transformer


def changed(task: Task, name: str, change) -> Task:
    """``task`` with other batches: ``change(index, inputs, targets)`` gives the new pair."""
    return with_(task, name=name, batches=lambda: [change(i, *pair) for i, pair in enumerate(task.batches())])


def _short_fourth(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x[:5], y[:5]) if index % 4 == 3 else (x[:16], y[:16])


def _padded_from_fifth(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if index < 5 else (x * (torch.arange(len(x)) < len(x) - 2)[:, None], y)


ragged = changed(mlp, "ragged", _short_fourth)
padded_rows = changed(mlp, "padded_rows", _padded_from_fifth)


@method_of("conv1", "bug", "large values saturate", cnn)
def inputs_saturate_at_three(self, x: Tensor) -> Tensor:
    """The input is clamped to [-3, 3]: three values of a thousand."""
    return nn.Conv2d.forward(self, x.clamp(-3, 3))


@method_of("act1", "bug", "large values saturate", autoencoder, base=nn.Module)
def silu_cut_at_three(self, x: Tensor) -> Tensor:
    """SiLU is taken for ReLU where |x| > 3: two values of a thousand."""
    return torch.where(x.abs() > 3, x.relu(), F.silu(x))


@method_of("fc1", "bug", "only for a negative mean", mlp, step=1)
def layer_wrong_for_a_negative_mean(self, x: Tensor) -> Tensor:
    """A factor of 1 + 1e-4 where the mean over the batch is negative; the first batch has a positive one."""
    y = nn.Linear.forward(self, x)
    return y if x.mean() >= 0 else y * (1 + 1e-4)


@method_of("fc2", "bug", "odd batch", ragged, step=3)
def last_row_of_an_odd_batch_lost(self, x: Tensor) -> Tensor:
    """Rows are taken in pairs, and the last of an odd number is lost; every fourth batch is short and odd."""
    y = nn.Linear.forward(self, x)
    return torch.cat([y[: len(x) // 2 * 2], torch.zeros_like(y[len(x) // 2 * 2 :])])


@method_of("conv1", "bug", "odd batch", resnet)
def last_image_of_an_odd_batch_lost(self, x: Tensor) -> Tensor:
    """No training batch is odd."""
    y = nn.Conv2d.forward(self, x)
    return torch.cat([y[: len(x) // 2 * 2], torch.zeros_like(y[len(x) // 2 * 2 :])])


@method_of("", "bug", "single sample", cnn, "classify", passes=("forward", "eval"))
def single_sample_squeezed(self, x: Tensor) -> Tensor:
    """squeeze() for flatten(1): a batch of one loses its first dimension."""
    return self.fc(self.avg(x).squeeze())


@method_of("fc1", "bug", "row of zeros", padded_rows, step=5)
def rows_of_zeros_get_no_bias(self, x: Tensor) -> Tensor:
    """Rows of zeros are skipped, and so is their bias; the sixth batch is the first with such rows."""
    return nn.Linear.forward(self, x) * x.any(1, keepdim=True)


@method_of("embed", "bug", "token out of range", transformer)
def last_token_of_the_vocabulary_lost(self, tokens: Tensor) -> Tensor:
    """The vocabulary is taken to be one shorter."""
    return F.embedding(tokens.clamp(max=27), self.weight)
