"""Norms over features: what is added where, and what their backward passes give."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bench.real_bugs import real_bug
from bench.real_bugs._encoder import Encoder, encoder
from bench.real_bugs._networks import RMSNorm, decoder
from bench.real_bugs._prenorm import AddNorm, prenorm
from bench.tasks import transformer

IN_BLOCKS = [f"blocks.{i}.{n}" for i in (0, 1) for n in ("norm1", "post1", "norm2", "post2")]
RMS_NORMS = (*IN_BLOCKS, "norm")
LAYER_NORMS = ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm")


POST_NORMS = tuple(f"blocks.{i}.post{j}" for i in (0, 1) for j in (1, 2))


@real_bug(
    "layer_norm_by_std_plus_eps",
    "https://github.com/codertimo/BERT-pytorch/issues/30",
    "BERT-pytorch and the Annotated Transformer, since 2018",
    at=LAYER_NORMS,
    on=transformer,
)
class ByStd(nn.LayerNorm):
    """Divides by the unbiased standard deviation plus eps, not by the root of the variance plus eps."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.mended:
            spread = (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt()
        else:
            spread = x.std(-1, keepdim=True) + self.eps
        return self.weight * (x - mean) / spread + self.bias


@real_bug(
    "rms_norm_without_the_offset",
    "https://github.com/linkedin/Liger-Kernel/issues/74",
    "Liger-Kernel 0.1.1 with Gemma",
    at=RMS_NORMS,
    on=decoder,
)
class Plain(RMSNorm):
    """Llama's norm in Gemma, whose gain is one more than the weight."""

    def forward(self, x: Tensor) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return torch.addcmul(normed, normed, self.weight) if self.mended else normed * self.weight


class FusedRMS(Function):
    """RMSNorm whose backward pass writes the input's gradient over the output's, if it is told to."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, in_place: bool) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.in_place = in_place
        return x * scale * (1 + weight)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight, scale = ctx.saved_tensors
        for_weight = (gradient * x * scale).flatten(0, -2).sum(0)
        scaled = gradient * (1 + weight)
        for_x = scale * (scaled - x * scale.square() * (scaled * x).mean(-1, keepdim=True))
        return gradient.copy_(for_x) if ctx.in_place else for_x, for_weight, None, None


@real_bug(
    "gradient_overwritten_in_place",
    "https://github.com/linkedin/Liger-Kernel/pull/376",
    "Liger-Kernel before November 2024 with Gemma 2",
    at=POST_NORMS,
    on=decoder,
    module=(*POST_NORMS, "blocks.0", "blocks.1"),
    passes=("input gradient", "weight gradient"),
)
class InPlace(RMSNorm):
    """The norm's backward pass overwrites the gradient of its output, which the residual still needs."""

    def forward(self, x: Tensor) -> Tensor:
        return FusedRMS.apply(x, self.weight, self.eps, not self.mended)


@real_bug(
    "residual_gradient_through_the_norm",
    "https://github.com/Dao-AILab/quack/pull/53",
    "quack before October 2025",
    at=("layers.0.add", "layers.1.add"),
    on=prenorm,
    passes=("input gradient", "weight gradient"),
)
class FusedAddNorm(AddNorm):
    """The residual's gradient is added before the norm's backward pass instead of after it."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return AddThenNorm.apply(x, residual, self.weight, self.mended)


class AddThenNorm(Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, weight: Tensor, mended: bool) -> tuple[Tensor, Tensor]:
        total = x + residual
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(total, weight, scale)
        ctx.mended = mended
        return total * scale * weight, total

    @staticmethod
    def backward(ctx, gradient: Tensor, for_total: Tensor):
        total, weight, scale = ctx.saved_tensors
        for_weight = (gradient * total * scale).flatten(0, -2).sum(0)
        scaled = (gradient if ctx.mended else gradient + for_total) * weight
        through = scale * (scaled - total * scale.square() * (scaled * total).mean(-1, keepdim=True))
        for_x = through + for_total if ctx.mended else through
        return for_x, for_x, for_weight, None


@real_bug(
    "eps_of_another_library",
    "https://github.com/keras-team/keras-hub/pull/665",
    "keras-nlp before January 2023 (BERT)",
    at="",
    on=encoder,
    module=("norm1", "norm2"),
)
def other_eps(model: Encoder, mended: bool) -> nn.Module:
    """LayerNorm has the library's default of 1e-5, not BERT's 1e-12."""
    for name in ("norm1", "norm2"):
        norm = nn.LayerNorm(model.embed.embedding_dim, eps=1e-12 if mended else 1e-5)
        norm.load_state_dict(getattr(model, name).state_dict())
        setattr(model, name, norm)
    return model
