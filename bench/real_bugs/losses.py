"""Losses of language models: over what they are averaged and what they ignore."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bench.real_bugs import real_bug
from bench.real_bugs._losing import (
    BatchMean,
    MaskedSum,
    Smoothed,
    TokenMean,
    Weighted,
    batch_mean,
    masked_sum,
    smoothed,
    token_mean,
    weighted,
    weights,
)


@real_bug(
    "mean_of_the_means_of_micro_batches",
    "https://github.com/huggingface/blog/pull/2414",
    "transformers before 4.46 (and most trainers), October 2024",
    at="criterion",
    on=token_mean,
)
class MicroBatches(TokenMean):
    """Gradient accumulation: each micro-batch's mean counts the same, however many tokens it has."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        targets, parts = labels[:, 1:], range(0, len(labels), 2)
        sums = [
            F.cross_entropy(logits[i : i + 2, :-1].mT, targets[i : i + 2], reduction="sum") for i in parts
        ]
        counts = [(targets[i : i + 2] != -100).sum() for i in parts]
        if self.mended:
            return sum(sums) / sum(counts)
        return sum(s / c for s, c in zip(sums, counts, strict=True)) / len(counts)


@real_bug(
    "last_window_divided_by_the_full_one",
    "https://github.com/huggingface/transformers/pull/39659",
    "transformers before July 2025",
    at="criterion",
    on=batch_mean,
)
class LastWindow(BatchMean):
    """Three micro-batches are left for a window of four, and their sum is divided by four."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        last, targets = logits[:, -1], labels[:, -1].clamp(min=0)
        parts = [
            F.cross_entropy(*p, reduction="sum") for p in zip(last.split(2), targets.split(2), strict=True)
        ]
        return sum(parts) / (len(labels) if self.mended else 4 * 2)


@real_bug(
    "labels_shifted_twice",
    "https://github.com/huggingface/transformers/issues/47394",
    "transformers since 4.49 (GitForCausalLM)",
    at="criterion",
    on=token_mean,
)
class Twice(TokenMean):
    """The model shifts the labels and so does its loss: each token is to tell the one after the next."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.mended:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), shifted.flatten(), ignore_index=-100)


@real_bug(
    "smoothing_counts_the_ignored",
    "https://github.com/pytorch/pytorch/issues/73205",
    "torch 1.10",
    at="criterion",
    on=smoothed,
)
class CountsIgnored(Smoothed):
    """The uniform part of label smoothing takes the ignored tokens in."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        logs, labels = logits.log_softmax(-1).flatten(0, 1), labels.flatten()
        uniform, real = -logs.mean(1), labels != -100
        if self.mended:
            uniform = uniform * real
        return 0.9 * F.nll_loss(logs, labels) + 0.1 * uniform.sum() / real.sum()


@real_bug(
    "masked_loss_divided_by_the_padding_too",
    "https://github.com/d2l-ai/d2l-en/issues/2076",
    "d2l (MaskedSoftmaxCELoss)",
    at="criterion",
    on=masked_sum,
)
class OverSteps(MaskedSum):
    """A sample's masked losses are averaged over all its steps before they are divided by the real tokens."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        real = (labels >= 0).to(logits.dtype)
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        masked = -chosen * real
        return (masked.sum(1) if self.mended else masked.mean(1)).sum() / real.sum()


@real_bug(
    "masked_tokens_in_the_numerator",
    "https://github.com/alibaba/ROLL/pull/444",
    "ROLL of May 2026",
    at="criterion",
    on=masked_sum,
)
class Unmasked(MaskedSum):
    """The mean over tokens divides by the valid ones and sums all of them."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
        return (torch.where(labels >= 0, losses, 0) if self.mended else losses).sum() / (labels >= 0).sum()


class FusedLinearLoss(Function):
    """Linear and cross-entropy in one; the weight's gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, mended: bool) -> Tensor:
        logits, real = hidden @ weight.T + bias, (labels != -100)[:, None]
        for_logits = (logits.softmax(-1) - F.one_hot(labels.clamp(min=0), len(weight))) * real
        ctx.save_for_backward(hidden, weight, for_logits)
        ctx.mended = mended
        return -(logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]) * real)[:, 0]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden, weight, for_logits = ctx.saved_tensors
        scaled = for_logits * (gradient[:, None] if ctx.mended else gradient[0])
        return scaled @ weight, scaled.T @ hidden, scaled.sum(0), None, None


@real_bug(
    "every_token_scaled_by_the_first",
    "https://github.com/linkedin/Liger-Kernel/pull/1298",
    "Liger-Kernel before July 2026 (fused linear cross-entropy, reduction='none')",
    at="criterion",
    on=weighted,
    module=("criterion", "criterion.head"),
    passes=("input gradient", "weight gradient"),
)
class ByTheFirst(Weighted):
    """The gradient of a loss a token is multiplied by the first token's upstream gradient throughout."""

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        labels, flat = labels.flatten(), hidden.flatten(0, 1)
        losses = FusedLinearLoss.apply(flat, self.head.weight, self.head.bias, labels, self.mended)
        return (losses * weights(labels, losses)).sum()
