"""Faults that need a rare input: large values, an odd or a single sample, a row of zeros."""

from __future__ import annotations

from dataclasses import replace as with_

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import CNN, Task, autoencoder, cnn, mlp, resnet, transformer


def changed(task: Task, name: str, change) -> Task:
    """``task`` with other batches: ``change(index, inputs, targets)`` gives the new pair."""
    return with_(task, name=name, batches=lambda: [change(i, *pair) for i, pair in enumerate(task.batches())])


def _short_fourth(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x[:5], y[:5]) if index % 4 == 3 else (x[:16], y[:16])


def _padded_from_fifth(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if index < 5 else (x * (torch.arange(len(x)) < len(x) - 2)[:, None], y)


ragged = changed(mlp, "ragged", _short_fourth)
padded_rows = changed(mlp, "padded_rows", _padded_from_fifth)


class Saturating(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3))


@case("bug", "large values saturate", cnn, module="conv1", passes="forward")
def inputs_saturate_at_three(model):
    """The input is clamped to [-3, 3]: three values of a thousand."""
    return recast(model, "conv1", Saturating)


class CutSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > 3, x.relu(), F.silu(x))


@case("bug", "large values saturate", autoencoder, module="act1", passes="forward")
def silu_cut_at_three(model):
    """SiLU is taken for ReLU where |x| > 3: two values of a thousand."""
    return replace(model, "act1", CutSiLU())


class BranchOnSign(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.mean() >= 0 else y * (1 + 1e-4)


@case("bug", "only for a negative mean", mlp, module="fc1", passes="forward", step=1)
def layer_wrong_for_a_negative_mean(model):
    """A factor of 1 + 1e-4 where the mean over the batch is negative; the first batch has a positive one."""
    return recast(model, "fc1", BranchOnSign)


class InPairs(nn.Linear):
    """A linear layer that takes its rows in pairs; the last of an odd number is never written."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y[: len(x) // 2 * 2], torch.zeros_like(y[len(x) // 2 * 2 :])])


@case("bug", "odd batch", ragged, module="fc2", passes="forward", step=3)
def last_row_of_an_odd_batch_lost(model):
    """Every fourth batch is short and odd."""
    return recast(model, "fc2", InPairs)


class InPairsOfImages(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y[: len(x) // 2 * 2], torch.zeros_like(y[len(x) // 2 * 2 :])])


@case("bug", "odd batch", resnet, module="conv1", passes="forward")
def last_image_of_an_odd_batch_lost(model):
    """No training batch is odd."""
    return recast(model, "conv1", InPairsOfImages)


class Squeezed(CNN):
    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act1(self.bn1(self.conv1(x))))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.act3(self.norm3(self.conv3(x)))
        return self.fc(self.avg(x).squeeze())


@case("bug", "single sample", cnn, module="", passes=("forward", "eval"))
def single_sample_squeezed(model):
    """squeeze() for flatten(1): a batch of one loses its first dimension."""
    return recast(model, "", Squeezed)


class SkipsEmptyRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.any(1, keepdim=True)


@case("bug", "row of zeros", padded_rows, module="fc1", passes="forward", step=5)
def rows_of_zeros_get_no_bias(model):
    """Rows of zeros are skipped, and so is their bias; the sixth batch is the first with such rows."""
    return recast(model, "fc1", SkipsEmptyRows)


class Capped(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.clamp(max=27), self.weight)


@case("bug", "token out of range", transformer, module="embed", passes="forward")
def last_token_of_the_vocabulary_lost(model):
    """The vocabulary is taken to be one shorter."""
    return recast(model, "embed", Capped)
