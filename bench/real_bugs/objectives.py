"""Other losses: what they weigh, over what they sum, and what gradient they leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from bench.real_bugs import real_bug
from bench.real_bugs._losing import (
    Balance,
    Distilled,
    Experts,
    Focal,
    Quantizer,
    distilled,
    focal,
    mixture,
    quantized,
)


@real_bug(
    "focal_loss_with_one_alpha",
    "https://github.com/kornia/kornia/issues/875",
    "kornia of February 2021; keras focal losses of 2018 (mkocabas/focal-loss-keras#6)",
    at="criterion",
    on=focal,
)
class OneAlpha(Focal):
    """Positives and negatives are weighted by the same alpha, which only scales the loss."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        sign = 2 * labels - 1
        logs = F.logsigmoid(sign * logits)
        alpha = torch.where(labels > 0, 0.25, 0.75) if self.mended else 0.25
        return -(alpha * (1 - logs.exp()) ** 2 * logs).mean()


@real_bug(
    "divergence_averaged_over_the_classes",
    "https://github.com/HikariTJU/LD/issues/74",
    "LD and mmdetection's knowledge_distillation_kl_div_loss, October 2023",
    at="criterion",
    on=distilled,
)
class OverClasses(Distilled):
    """The divergence is averaged over the classes instead of summed."""

    def forward(self, logits: Tensor, teacher: Tensor) -> Tensor:
        target = (teacher / 2).softmax(1)
        terms = target * (target.log() - (logits / 2).log_softmax(1))
        return (terms.sum(1) if self.mended else terms.mean(1)).mean() * 4


@real_bug(
    "commitment_and_codebook_exchanged",
    "https://github.com/CompVis/taming-transformers/issues/57",
    "taming-transformers (VectorQuantizer)",
    at="quantizer",
    on=quantized,
    passes=("input gradient", "weight gradient"),
)
class Exchanged(Quantizer):
    """Beta weighs the codebook's term instead of the commitment."""

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        code = self.nearest(z)
        commitment, codebook = (code.detach() - z).square().mean(), (code - z.detach()).square().mean()
        loss = codebook + 0.25 * commitment if self.mended else 0.25 * codebook + commitment
        return z - (z - code).detach(), loss


@real_bug(
    "codebook_loss_after_straight_through",
    "https://github.com/andylolu2/jax-vqvae-gpt/issues/2",
    "jax-vqvae-gpt before September 2022",
    at="quantizer",
    on=quantized,
    passes=("input gradient", "weight gradient"),
)
class AfterStraightThrough(Quantizer):
    """The codebook's loss is taken of the straight-through result, so that the codes get no gradient."""

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        code = self.nearest(z)
        through = z + (code - z).detach()
        pulled = code if self.mended else through
        loss = (pulled - z.detach()).square().mean() + 0.25 * (code.detach() - z).square().mean()
        return through, loss


@real_bug(
    "balance_over_all_layers_at_once",
    "https://github.com/huggingface/transformers/issues/31464",
    "transformers of June 2024 (Mixtral)",
    at="balance",
    on=mixture,
)
class AtOnce(Balance):
    """The layers' router logits are concatenated: what one layer overuses another may underuse."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if self.mended:
            return torch.stack([self.of(first), self.of(second)]).mean()
        return self.of(torch.cat([first, second]))


class ScaledBy(Function):
    """Adds the gradient of an auxiliary loss to a router's logits, as Megatron's MoEAuxLossAutoScaler."""

    @staticmethod
    def forward(ctx, logits: Tensor, auxiliary: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(auxiliary)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (auxiliary,) = ctx.saved_tensors
        return gradient, torch.full_like(auxiliary, ctx.scale), None


class Router(Experts):
    """Half of the tokens lie on each of two devices; the auxiliary loss is scaled by a device's own count."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, logits = super().forward(x)
        local = torch.tensor(len(x) // 2)
        total = self.reduced(local)
        auxiliary = logits.softmax(-1).square().mean() / total
        return ScaledBy.apply(y, auxiliary, 0.01 * int(local)), logits

    def reduced(self, count: Tensor) -> Tensor:
        return count * 2


def _routers(model: nn.Module) -> nn.Module:
    model.first.__class__ = model.second.__class__ = Router
    return model


routed = type(mixture)("routed", lambda: _routers(mixture.network()), mixture.batches, mixture.loss)


@real_bug(
    "local_count_overwritten_by_the_sum",
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "Megatron Core of September 2026 (finding 10)",
    at=("first", "second"),
    on=routed,
    passes=("input gradient", "weight gradient"),
)
class Overwritten(Router):
    """Counts are summed over the devices in place, so that the local one, which scales the loss, doubles."""

    def reduced(self, count: Tensor) -> Tensor:
        return count.mul(2) if self.mended else count.mul_(2)
