"""Losses: cross-entropy behind a linear layer, divergences; a value a token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.low_precision._pairs import Op, group, matrix, plain, swap, wide

pair = group(__name__, "loss")


def head_loss(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Logits in float32: the products of half operands are exact."""
    with plain():
        return F.cross_entropy(F.linear(wide(x), wide(weight)), labels, reduction="none")


class HeadLoss(torch.autograd.Function):
    """A chunk of tokens at a time, logits made again in the backward pass.

    ``narrow`` sums the weight's gradient in the weight's own type; ``stale`` takes the softmax of the
    chunk before.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, labels: Tensor, weight: Tensor, size: int, narrow: bool, stale: bool
    ) -> Tensor:
        ctx.save_for_backward(x, labels, weight)
        ctx.size, ctx.narrow, ctx.stale = size, narrow, stale
        parts = zip(x.split(size), labels.split(size), strict=True)
        return torch.cat([head_loss(rows, there, weight) for rows, there in parts])

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        x, labels, weight = ctx.saved_tensors
        dx, before = torch.empty_like(x), None
        dw = torch.zeros_like(weight if ctx.narrow else wide(weight))
        for i in range(0, len(x), ctx.size):
            part = slice(i, i + ctx.size)
            fresh = F.linear(wide(x[part]), wide(weight)).softmax(-1)
            probabilities = before if ctx.stale and i else fresh
            before = fresh
            slope = probabilities - F.one_hot(labels[part], len(weight)).to(fresh.dtype)
            slope = slope * wide(dy[part]).unsqueeze(-1)
            dx[part] = (slope @ wide(weight)).to(x.dtype)
            dw += (slope.mT @ wide(x[part])).to(dw.dtype)
        return dx, None, dw.to(weight.dtype), None, None, None


def chunked_loss(
    x: Tensor, labels: Tensor, weight: Tensor, size: int, narrow: bool = False, stale: bool = False
):
    return HeadLoss.apply(x, labels, weight, size, narrow, stale)


def half_logits(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """The logits in the layer's own type: 2^-9 of it, where float32 kept 2^-24: ten bits and more."""
    return F.cross_entropy(wide(F.linear(x, weight)), labels, reduction="none")


def z_loss(x: Tensor, labels: Tensor, by: float = 1e-3) -> Tensor:
    """PaLM's: the squared logarithm of the partition function as well."""
    top = torch.logsumexp(wide(x), -1)
    return top - wide(x).gather(-1, labels.unsqueeze(-1)).squeeze(-1) + by * top**2


def z_loss_shifted(x: Tensor, labels: Tensor) -> Tensor:
    """The maximum is taken off by hand."""
    h = wide(x)
    top = h.amax(-1, keepdim=True).detach()
    logarithm = (h - top).exp().sum(-1).log()
    return (
        logarithm
        - (h - top).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        + 1e-3 * (logarithm + top[..., 0]) ** 2
    )


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence of two sets of logits, a value a token."""
    log_p, log_q = wide(teacher).log_softmax(-1), wide(student).log_softmax(-1)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    kl = partial(F.kl_div, log_target=True, reduction="none")
    return (beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)).sum(-1)


def jsd_by_hand(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    log_p, log_q = (wide(x) - torch.logsumexp(wide(x), -1, keepdim=True) for x in (teacher, student))
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log(q + beta * (p - q))
    return (beta * (p * (log_p - log_m)).sum(-1)) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


class Distilled(Op):
    """Both sets of logits come of one head, as half under autocast."""

    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        return self.fn(F.linear(x, self.weight), F.linear(teacher, self.weight))


def tokens(n: int, d: int, words: int) -> partial:
    return partial(lambda: (torch.randn(n, d), torch.randint(words, (n,))))


def head(words: int, d: int) -> Op:
    return Op(head_loss, weight=2 * matrix(words, d))


def two(n: int, d: int) -> partial:
    return partial(lambda: (torch.randn(n, d), torch.randn(n, d)))


def distilled() -> Op:
    return Distilled(jsd, weight=2 * matrix(96, 32))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("linear_cross_entropy_chunked", "bf16-true", R, lambda: head(128, 64),
         swap(partial(chunked_loss, size=64)), tokens(256, 64, 128), "liger linear cross entropy"),
    pair("z_loss_by_hand", "16-true", R, lambda: Op(z_loss), swap(z_loss_shifted), tokens(256, 96, 96),
         "liger cross entropy"),
    pair("jsd_by_hand", "bf16-mixed", R, distilled, swap(jsd_by_hand), two(256, 32), "liger jsd"),
    pair("linear_cross_entropy_stale", "bf16-true", B, lambda: head(96, 64),
         swap(partial(chunked_loss, size=32, stale=True)), tokens(256, 64, 96), "liger linear cross entropy"),
    pair("jsd_weight_off_by_2e-2", "bf16-mixed", B, distilled, swap(partial(jsd_by_hand, beta=0.51)),
         two(256, 32), "liger jsd"),
    pair("z_loss_forgotten", "16-true", B, lambda: Op(z_loss), swap(partial(z_loss, by=0.0)),
         tokens(256, 96, 96), "liger cross entropy"),
    pair("logits_in_half", "bf16-mixed", L, lambda: head(128, 64), swap(half_logits), tokens(256, 64, 128),
         "liger linear cross entropy", factor=15000),
    # 256 chunks of two tokens: a running sum loses sqrt(256 / 2) units at its end.
    pair("head_gradient_sum_in_half", "bf16-true", L, lambda: head(48, 32),
         swap(partial(chunked_loss, size=2, narrow=True)), tokens(512, 32, 48), "liger linear cross entropy",
         factor=8.7),
]  # fmt: skip
