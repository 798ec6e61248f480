"""Faults in buffers and in what differs between training and evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.case import case, in_place_of, method_of
from bench.surgery import recast, replace
from bench.tasks import autoencoder, cnn, dropout_transformer, mlp, resnet


@case("bug", "momentum of the running statistics", cnn, module="bn1", passes="buffer")
def running_statistics_with_complementary_momentum(model):
    """0.9, which is how TensorFlow writes PyTorch's 0.1."""
    model.bn1.momentum = 0.9
    return model


@case("bug", "momentum of the running statistics", resnet, module="layer3.1.bn1", passes="buffer")
def running_statistics_with_keras_momentum(model):
    """0.01, Keras' default, for 0.1 in one of twenty."""
    model.layer3[1].bn1.momentum = 0.01
    return model


@case("bug", "momentum of the running statistics", resnet, module="layer4.1.bn2", passes="buffer", steps=12)
def running_statistics_as_plain_mean(model):
    """momentum=None: the mean over all batches."""
    model.layer4[1].bn2.momentum = None
    return model


class BiasedRunningVariance(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance, self.momentum)
                self.num_batches_tracked += 1
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


@case("bug", "running variance biased", resnet, module="layer1.1.bn2", passes="buffer")
def running_variance_biased_over_many(model):
    """n for n - 1 with n = 32,768: off by 3e-5."""
    return recast(model, "layer1.1.bn2", BiasedRunningVariance)


@case("bug", "running variance biased", cnn, module="bn2", passes="buffer")
def running_variance_biased_over_few(model):
    """n for n - 1 with n = 192."""
    return recast(model, "bn2", BiasedRunningVariance)


@method_of("bn2", "bug", "running statistics updated twice", cnn, passes="buffer")
def running_statistics_updated_again_when_recomputed(self, x: Tensor) -> Tensor:
    """A checkpointed BatchNorm runs again in the backward pass and counts the batch twice."""
    if self.training and torch.is_grad_enabled():
        return checkpoint(nn.BatchNorm2d.forward, self, x, use_reentrant=False)
    return nn.BatchNorm2d.forward(self, x)


NAME = "running_mean_shared_by_both_halves"


@in_place_of("layer2.1.bn2", "bug", "running statistics mixed up", resnet, NAME, passes="buffer")
class HalvesWithOneMean(nn.BatchNorm2d):
    """A BatchNorm in two parts along its channels; the second writes its mean where the first did."""

    def part(self, x: Tensor, rows: slice, written: slice) -> Tensor:
        mean, var = self.running_mean[written], self.running_var[rows]
        weight, bias = self.weight[rows], self.bias[rows]
        return F.batch_norm(x[:, rows], mean, var, weight, bias, self.training, self.momentum, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        first, second = slice(0, self.num_features // 2), slice(self.num_features // 2, None)
        return torch.cat([self.part(x, first, first), self.part(x, second, first)], 1)


class AlwaysRunning(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


@case("bug", "BatchNorm in evaluation mode", resnet, module="layer3.0.bn1")
def batch_norm_left_in_evaluation_mode(model):
    """A BatchNorm from a fine-tuning script that never leaves evaluation mode."""
    return recast(model, "layer3.0.bn1", AlwaysRunning).train(model.training)


@method_of("bn1", "bug", "batch statistics in evaluation", cnn, passes="eval")
def batch_norm_uses_the_batch_in_evaluation(self, x: Tensor) -> Tensor:
    """training=True is written into the call."""
    mean, var = (self.running_mean, self.running_var) if self.training else (None, None)
    return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)


@case("bug", "running statistics in evaluation", autoencoder, module="norm1", passes=("eval", "buffer"))
def instance_norm_tracks_statistics(model):
    """track_running_stats=True: evaluation no longer normalises by the image."""
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    norm.load_state_dict(model.norm1.state_dict(), strict=False)
    return replace(model, "norm1", norm)


@method_of("blocks.0.drop", "bug", "dropout in evaluation", dropout_transformer, passes="eval")
def dropout_scales_in_evaluation_too(self, x: Tensor) -> Tensor:
    """Scaled in training, as PyTorch does, and in evaluation, as the paper does."""
    return nn.Dropout.forward(self, x) if self.training else x * (1 - self.p)


@method_of("blocks.1.drop", "bug", "dropout in evaluation", dropout_transformer, passes="eval")
def dropout_active_in_evaluation(self, x: Tensor) -> Tensor:
    """F.dropout without training=self.training."""
    return F.dropout(x, self.p)


@case("bug", "dropout rate", dropout_transformer, module="blocks.1.drop")
def dropout_rate_doubled(model):
    """p = 0.2 for 0.1."""
    return replace(model, "blocks.1.drop", nn.Dropout(0.2))


@case("bug", "dropout rate", dropout_transformer, module="blocks.0.drop")
def dropout_rate_taken_for_the_share_kept(model):
    """p = 0.9: the share that is kept in another library."""
    return replace(model, "blocks.0.drop", nn.Dropout(0.9))


@method_of("blocks.1.drop", "bug", "dropout rate", dropout_transformer)
def dropout_without_its_scale(self, x: Tensor) -> Tensor:
    """The mask is right; what is kept is not divided by 1 - p."""
    return x * (F.dropout(torch.ones_like(x), self.p) > 0) if self.training else x


@method_of("norm3", "bug", "another branch in evaluation", cnn, passes="eval")
def other_groups_in_evaluation(self, x: Tensor) -> Tensor:
    """The path for inference normalises over two groups, not four."""
    groups = self.num_groups if self.training else self.num_groups // 2
    return F.group_norm(x, groups, self.weight, self.bias, self.eps)


@in_place_of("fc3", "bug", "stale weight in evaluation", mlp, "packed_weight_never_refreshed", passes="eval")
class StaleInEvaluation(nn.Module):
    """Evaluates with the weight packed when it was made, which never sees what is learnt."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.register_buffer("packed", linear.weight.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.training else F.linear(x, self.packed, self.linear.bias)
