"""Losses of other kinds: distillation with a temperature, smoothed labels, contrast, sums over a sequence."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.low_precision._pairs import Op, group, matrix, plain, swap, wide

pair = group(__name__, "loss")


class Distilled(Op):
    """Student and teacher share a head."""

    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        return self.fn(F.linear(x, self.weight), F.linear(teacher, self.weight))


class Labelled(Op):
    """Logits of a head, half under autocast, and their labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.fn(F.linear(x, self.weight), labels)


def divergence(student: Tensor, teacher: Tensor, heat: float = 2.0) -> Tensor:
    """Hinton's: of logits over a temperature, times its square; a value a token."""
    log_q, log_p = ((wide(x) / heat).log_softmax(-1) for x in (student, teacher))
    return heat**2 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


class Divergence(torch.autograd.Function):
    """Both gradients written out; ``power`` of the temperature is what multiplies them."""

    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor, heat: float, power: int) -> Tensor:
        log_q, log_p = ((wide(x) / heat).log_softmax(-1) for x in (student, teacher))
        ctx.save_for_backward(log_q, log_p)
        ctx.types, ctx.times, ctx.heat = (student.dtype, teacher.dtype), heat**power, heat
        return heat**2 * (log_p.exp() * (log_p - log_q)).sum(-1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        log_q, log_p = ctx.saved_tensors
        p, g = log_p.exp(), wide(dy).unsqueeze(-1) * ctx.times
        apart = log_p - log_q
        dq, dp = g * (log_q.exp() - p), g * p * (apart - (p * apart).sum(-1, keepdim=True))
        return dq.to(ctx.types[0]), dp.to(ctx.types[1]), None, None


def divergence_by_hand(student: Tensor, teacher: Tensor, power: int = 1) -> Tensor:
    return Divergence.apply(student, teacher, 2.0, power)


def smoothed(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(wide(x), labels, reduction="none", label_smoothing=0.1)


def smoothed_by_hand(x: Tensor, labels: Tensor, others: bool = False) -> Tensor:
    """``others`` spreads the tenth over the wrong classes only."""
    h = wide(x) - torch.logsumexp(wide(x), -1, keepdim=True)
    right = h.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    rest = (h.sum(-1) - right) / (x.shape[-1] - 1) if others else h.mean(-1)
    return -(0.9 * right + 0.1 * rest)


def masked(x: Tensor, labels: Tensor) -> Tensor:
    """Every eighth token is left out."""
    left = torch.where(torch.arange(len(labels)) % 8 == 7, -100, labels)
    return F.cross_entropy(wide(x), left, reduction="none")


def masked_as_first(x: Tensor, labels: Tensor) -> Tensor:
    """What is left out has weight 1e-2 on class 0: an index that was clamped, a mask that was not zero."""
    out = torch.arange(len(labels)) % 8 == 7
    loss = F.cross_entropy(wide(x), torch.where(out, 0, labels), reduction="none")
    return torch.where(out, 1e-2 * loss, loss)


def contrast(x: Tensor, y: Tensor, heat: float = 0.1) -> Tensor:
    """CLIP's, a value a row: similarities in float32."""
    with plain():
        a, b = F.normalize(wide(x), dim=-1), F.normalize(wide(y), dim=-1)
        return F.cross_entropy(a @ b.mT / heat, torch.arange(len(x)), reduction="none")


def contrast_in_blocks(x: Tensor, y: Tensor) -> Tensor:
    """Thirty-two columns at a time, with a running maximum."""
    with plain():
        a, b = F.normalize(wide(x), dim=-1) * 10, F.normalize(wide(y), dim=-1)
        top, total = torch.full_like(a[:, 0], -torch.inf), torch.zeros_like(a[:, 0])
        for block in b.split(32):
            scores = a @ block.mT
            new = torch.maximum(top, scores.amax(-1).detach())
            total, top = total * (top - new).exp() + (scores - new[:, None]).exp().sum(-1), new
        return total.log() + top - (a * b).sum(-1)


def contrast_in_half(x: Tensor, y: Tensor) -> Tensor:
    """The similarities are rounded before the temperature makes ten of each: 2^-12 of ten, ten bits."""
    a, b = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return F.cross_entropy(wide(a @ b.mT) / 0.1, torch.arange(len(x)), reduction="none")


def preference(x: Tensor, labels: Tensor) -> Tensor:
    """The log probability of a text up to each of its tokens, [texts, time, words] of logits, in float32."""
    return wide(x).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).cumsum(-1).to(x.dtype)


def preference_by_hand(x: Tensor, labels: Tensor) -> Tensor:
    """What was said less the logarithm of the sum, each summed on its own."""
    said = wide(x).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (said.cumsum(-1) - torch.logsumexp(wide(x), -1).cumsum(-1)).to(x.dtype)


def preference_in_half(x: Tensor, labels: Tensor) -> Tensor:
    """Token after token in x's type: 384 additions, sqrt(384 / 2) units at the end, about 3 bits."""
    parts = [torch.zeros_like(x[:, 0, 0])]
    for row in x.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).unbind(-1):
        parts.append(parts[-1] + row)
    return torch.stack(parts[1:], -1)


def two(n: int, d: int) -> partial:
    return partial(lambda: (torch.randn(n, d), torch.randn(n, d)))


def tokens(words: int, *shape: int) -> partial:
    return partial(lambda: (torch.randn(*shape), torch.randint(words, shape[:-1])))


def shared() -> Op:
    return Distilled(divergence, weight=2 * matrix(80, 40))


def labelled(fn, words: int = 64) -> Op:
    return Labelled(fn, weight=2 * matrix(words, 48))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("distillation_by_hand", "16-mixed", R, shared, swap(divergence_by_hand), two(256, 40), "liger jsd"),
    pair("smoothed_by_hand", "bf16-mixed", R, lambda: labelled(smoothed), swap(smoothed_by_hand),
         tokens(64, 256, 48), "liger cross entropy"),
    pair("contrast_in_blocks", "bf16-true", R, lambda: Op(contrast), swap(contrast_in_blocks), two(256, 32),
         "liger cross entropy"),
    pair("sequence_sums_apart", "16-true", R, lambda: Op(preference), swap(preference_by_hand),
         tokens(32, 4, 96, 32), "liger cross entropy"),
    pair("distillation_heat_squared_twice", "16-mixed", B, shared, swap(partial(divergence_by_hand, power=2)),
         two(256, 40), "liger jsd"),
    pair("smoothed_over_others", "bf16-mixed", B, lambda: labelled(smoothed),
         swap(partial(smoothed_by_hand, others=True)), tokens(64, 256, 48), "liger cross entropy"),
    pair("left_out_tokens_count", "16-true", B, lambda: labelled(masked), swap(masked_as_first),
         tokens(64, 256, 48), "liger linear cross entropy"),
    pair("contrast_in_half", "16-mixed", L, lambda: Op(contrast), swap(contrast_in_half), two(256, 32),
         "liger cross entropy", factor=2200),
    pair("sequence_sum_in_half", "bf16-true", L, lambda: Op(preference), swap(preference_in_half),
         tokens(32, 2, 384, 32), "liger cross entropy", factor=10),
]  # fmt: skip
