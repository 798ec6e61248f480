"""What torch does around a network: recomputing activations, and gradients of views and scatters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from bench.real_bugs import real_bug
from bench.tasks import TransformerBlock, _classes, _task, cnn, dropout_transformer


class Recomputed(Function):
    """Runs ``block`` without a graph, and again in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, block: nn.Module, mended: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block, ctx.weights, ctx.mended, ctx.state = block, weights, mended, torch.get_rng_state()
        with torch.no_grad():
            return TransformerBlock.forward(block, x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        now = torch.get_rng_state()
        if ctx.mended:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = TransformerBlock.forward(ctx.block, x)
        torch.set_rng_state(now)
        for_x, *for_weights = torch.autograd.grad(y, (x, *ctx.weights), gradient)
        return for_x, None, None, *for_weights


@real_bug(
    "recomputed_with_other_masks",
    "https://github.com/openai/guided-diffusion/issues/167",
    "guided-diffusion (nn.checkpoint)",
    at=("blocks.0", "blocks.1"),
    on=dropout_transformer,
    module=("blocks.0", "blocks.1", "blocks.0.drop", "blocks.1.drop"),
    passes=("input gradient", "weight gradient"),
)
class OtherMasks(TransformerBlock):
    """Checkpointing runs a block again in the backward pass and draws other dropout masks."""

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, self, self.mended, *self.parameters())


class Diagonal(nn.Module):
    """[N, 6, 6] and [N, 6] -> the matrices with another diagonal."""

    def forward(self, x: Tensor, diagonal: Tensor) -> Tensor:
        return torch.diagonal_scatter(x, diagonal, 0, 1, 2)


class Matrices(nn.Module):
    """[N, 8] -> [N, 4]."""

    def __init__(self):
        super().__init__()
        self.matrix, self.diagonal, self.scatter = nn.Linear(8, 36), nn.Linear(8, 6), Diagonal()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        scattered = self.scatter(self.matrix(x).unflatten(1, (6, 6)), self.diagonal(x))
        return self.fc(scattered.sin().sum(2))


matrices = _task("matrices", Matrices, lambda: (torch.randn(12, 8), _classes(12, 4)))


class Scattered(Function):
    @staticmethod
    def forward(ctx, x: Tensor, diagonal: Tensor, mended: bool) -> Tensor:
        ctx.mended = mended
        own = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return x * (1 - own) + diagonal[:, :, None] * own

    @staticmethod
    def backward(ctx, gradient: Tensor):
        for_diagonal = gradient.diagonal(0, 1, 2)
        if not ctx.mended:
            return torch.zeros_like(gradient), for_diagonal, None
        return gradient - torch.diag_embed(for_diagonal), for_diagonal, None


@real_bug(
    "scatter_without_a_gradient",
    "https://github.com/pytorch/pytorch/issues/182012",
    "torch 2.12 and nightlies of May 2026 (Inductor)",
    at="scatter",
    on=matrices,
    passes="input gradient",
)
class NoGradient(Diagonal):
    """The compiled backward pass of diagonal_scatter gives the scattered-into tensor a gradient of zeros."""

    def forward(self, x: Tensor, diagonal: Tensor) -> Tensor:
        return Scattered.apply(x, diagonal, self.mended)


class Counted(nn.BatchNorm2d):
    """Follows its statistics beside the checkpointed part, once a step."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            var, mean = torch.var_mean(x, (0, 2, 3))
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        return checkpoint(self.normed, x, use_reentrant=False)

    def normed(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, True, eps=self.eps)


class CountedTwice(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@real_bug(
    "checkpointed_statistics_count_twice",
    "https://github.com/pfnet/pytorch-pfn-extras/pull/117",
    "torch.utils.checkpoint around a batch norm; torchvision's memory-efficient DenseNet to this day",
    at=("bn1", "bn2"),
    on=cnn,
    passes=("buffer", "eval"),
)
def counted_twice(norm: nn.BatchNorm2d, mended: bool) -> nn.Module:
    """The forward pass that the backward pass repeats moves the running statistics once more."""
    norm.__class__ = Counted if mended else CountedTwice
    return norm
