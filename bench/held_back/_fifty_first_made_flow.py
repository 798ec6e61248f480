"""A small masked autoregressive flow: MADE layers, reversals and batch norms over sets under a context."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, RAW, CONTEXT, HIDDEN, LAYERS = 5, 7, 6, 31, 3
SETS, POINTS = 4, 9


class MaskedLinear(nn.Linear):
    """A linear layer whose weights go from lower degrees to higher ones only."""

    def __init__(self, in_degrees: Tensor, out_features: int, is_output: bool = False):
        super().__init__(len(in_degrees), out_features)
        if is_output:
            degrees = torch.arange(1, FEATURES + 1).repeat_interleave(out_features // FEATURES)
            mask = degrees[:, None] > in_degrees
        else:
            degrees = torch.arange(out_features) % (FEATURES - 1) + 1
            mask = degrees[:, None] >= in_degrees
        self.register_buffer("mask", mask.float())
        self.register_buffer("degrees", degrees)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MaskedFeedforwardBlock(nn.Module):
    def __init__(self, in_degrees: Tensor):
        super().__init__()
        self.linear = MaskedLinear(in_degrees, HIDDEN)
        self.degrees = self.linear.degrees

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        return F.relu(self.linear(inputs))


class MaskedResidualBlock(nn.Module):
    def __init__(self, in_degrees: Tensor):
        super().__init__()
        self.context_layer = nn.Linear(CONTEXT, HIDDEN)
        linear_0 = MaskedLinear(in_degrees, HIDDEN)
        self.linear_layers = nn.ModuleList([linear_0, MaskedLinear(linear_0.degrees, HIDDEN)])
        self.degrees = self.linear_layers[1].degrees

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        temps = self.linear_layers[0](F.relu(inputs))
        temps = self.linear_layers[1](F.relu(temps))
        temps = F.glu(torch.cat((temps, self.context_layer(context)), dim=1), dim=1)
        return inputs + temps


class MADE(nn.Module):
    def __init__(self):
        super().__init__()
        self.initial_layer = MaskedLinear(torch.arange(1, FEATURES + 1), HIDDEN)
        self.context_layer = nn.Linear(CONTEXT, HIDDEN)
        self.blocks, degrees = nn.ModuleList(), self.initial_layer.degrees
        for block in (MaskedFeedforwardBlock, MaskedResidualBlock, MaskedResidualBlock):
            self.blocks.append(block(degrees))
            degrees = self.blocks[-1].degrees
        self.final_layer = MaskedLinear(degrees, 2 * FEATURES, is_output=True)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        temps = self.initial_layer(inputs) + self.context_layer(context)
        for block in self.blocks:
            temps = block(temps, context)
        return self.final_layer(temps)


class MaskedAffineAutoregressiveTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.autoregressive_net = MADE()
        self.epsilon = 1e-3

    def scale_and_shift(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        params = self.autoregressive_net(inputs, context).view(-1, FEATURES, 2)
        return F.softplus(params[..., 0]) + self.epsilon, params[..., 1]

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.scale_and_shift(inputs, context)
        return scale * inputs + shift, scale.log().sum(1)


class ReversePermutation(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("_permutation", torch.arange(FEATURES - 1, -1, -1))

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[:, self._permutation], inputs.new_zeros(len(inputs))


class BatchNorm(nn.Module):
    def __init__(self, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.unconstrained_weight = nn.Parameter(torch.zeros(FEATURES))
        self.bias = nn.Parameter(torch.zeros(FEATURES))
        self.register_buffer("running_mean", 0.2 * torch.randn(FEATURES))
        self.register_buffer("running_var", 0.6 + torch.rand(FEATURES))

    @property
    def weight(self) -> Tensor:
        return F.softplus(self.unconstrained_weight) + self.eps

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = inputs.mean(0), inputs.var(0)
            self.running_mean.mul_(1 - self.momentum).add_(mean.detach() * self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(var.detach() * self.momentum)
        outputs = self.weight * (inputs - mean) / torch.sqrt(var + self.eps) + self.bias
        logabsdet = (self.weight.log() - 0.5 * torch.log(var + self.eps)).sum()
        return outputs, logabsdet * inputs.new_ones(len(inputs))


class CompositeTransform(nn.Module):
    def __init__(self, transforms: list[nn.Module]):
        super().__init__()
        self._transforms = nn.ModuleList(transforms)

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        total = inputs.new_zeros(len(inputs))
        for transform in self._transforms:
            inputs, logabsdet = transform(inputs, context)
            total = total + logabsdet
        return inputs, total


class ConditionalDiagonalNormal(nn.Module):
    def __init__(self):
        super().__init__()
        self._context_encoder = nn.Linear(CONTEXT, 2 * FEATURES)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        """The log-probability of the inputs."""
        means, log_stds = self._context_encoder(context).chunk(2, 1)
        away = (inputs - means) * torch.exp(-log_stds)
        log_prob = -0.5 * away.square().sum(1) - log_stds.sum(1)
        return log_prob - 0.5 * FEATURES * math.log(2 * math.pi)


class Flow(nn.Module):
    """Sets [N, T, D] under contexts [N, R]: nats per dimension, and what is left."""

    def __init__(self):
        super().__init__()
        kinds = (ReversePermutation, MaskedAffineAutoregressiveTransform, BatchNorm)
        self._transform = CompositeTransform([kind() for _ in range(LAYERS) for kind in kinds])
        self._distribution = ConditionalDiagonalNormal()
        self._embedding_net = nn.Sequential(nn.Linear(RAW, 13), nn.ReLU(), nn.Linear(13, CONTEXT))
        for p in self.parameters():
            nn.init.normal_(p, std=0.8 / math.sqrt(p.shape[1]) if p.ndim == 2 else 0.15)

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._embedding_net(context).repeat_interleave(POINTS, 0)
        z, logabsdet = self._transform(inputs.flatten(0, 1), embedded)
        nats = -(self._distribution(z, embedded) + logabsdet) / FEATURES
        return nats.view(-1, POINTS), z.view_as(inputs)


def bananas() -> tuple[dict[str, Tensor], Tensor]:
    """Sets of bent points, whose place and bend the context tells; and a weight of each set."""
    context, x = torch.randn(SETS, RAW), torch.randn(SETS, POINTS, FEATURES)
    bend = context[:, None, :1] * x[..., :1].square() / 2
    x = torch.cat([x[..., :1], x[..., 1:3] / 2 + bend, x[..., 3:] + context[:, None, 1:3]], 2)
    return {"inputs": x, "context": context}, torch.rand(SETS) + 0.5


def nats_by_set(outputs: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    return (outputs[0].mean(1) * weight).mean() / 4
