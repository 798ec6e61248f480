"""A small neural spline flow: two scales of rational-quadratic couplings and LU layers, given a context."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, SUMMARY, CONTEXT, HIDDEN, BLOCKS = 11, 7, 9, 20, 2
BINS, BOUND, SAMPLES, LEVELS, STEPS = 8, 2.5, 13, 2, 2
MIN_BIN = MIN_DERIVATIVE = MIN_DIAGONAL = 1e-3
Moved = tuple[Tensor, Tensor]


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs)), nn.init.normal_(layer.bias, std=0.2)
    return layer


def knots(unnormalized: Tensor) -> Tensor:
    sizes = MIN_BIN + (1 - MIN_BIN * BINS) * F.softmax(unnormalized, -1)
    inner = 2 * BOUND * sizes.cumsum(-1)[..., :-1] - BOUND
    return F.pad(F.pad(inner, (1, 0), value=-BOUND), (0, 1), value=BOUND)


def rational_quadratic_spline(x: Tensor, widths: Tensor, heights: Tensor, derivatives: Tensor) -> Moved:
    across, up, slopes = knots(widths), knots(heights), MIN_DERIVATIVE + F.softplus(derivatives)
    index = (x[..., None] >= across[..., 1:-1]).sum(-1, keepdim=True)
    left, right, low, high, first, last = (
        values.gather(-1, index + more).squeeze(-1) for values in (across, up, slopes) for more in (0, 1)
    )
    delta, theta = (high - low) / (right - left), (x - left) / (right - left)
    both = theta * (1 - theta)
    denominator = delta + (first + last - 2 * delta) * both
    outputs = low + (high - low) * (delta * theta**2 + first * both) / denominator
    slope = delta**2 * (last * theta**2 + 2 * delta * both + first * (1 - theta) ** 2)
    return outputs, torch.log(slope) - 2 * torch.log(denominator)


def unconstrained_spline(x: Tensor, widths: Tensor, heights: Tensor, inner: Tensor) -> Moved:
    inside = x.abs() <= BOUND
    derivatives = F.pad(inner, (1, 1), value=math.log(math.exp(1 - MIN_DERIVATIVE) - 1))
    outputs, logabsdet = x.clone(), torch.zeros_like(x)
    of_inside = (values[inside] for values in (x, widths, heights, derivatives))
    outputs[inside], logabsdet[inside] = rational_quadratic_spline(*of_inside)
    return outputs, logabsdet


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.context_layer = linear(CONTEXT, HIDDEN)
        self.linear_layers = nn.ModuleList([linear(HIDDEN, HIDDEN, 1.4) for _ in range(2)])

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        temps = self.linear_layers[1](F.relu(self.linear_layers[0](F.relu(inputs))))
        return inputs + F.glu(torch.cat((temps, self.context_layer(context)), dim=1), dim=1)


class ResidualNet(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.initial_layer = linear(in_features + CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(BLOCKS)])
        self.final_layer = linear(HIDDEN, out_features)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        temps = self.initial_layer(torch.cat((inputs, context), dim=1))
        for block in self.blocks:
            temps = block(temps, context)
        return self.final_layer(temps)


class PiecewiseRationalQuadraticCouplingTransform(nn.Module):
    def __init__(self, features: int, even: bool):
        super().__init__()
        moves = torch.arange(features) % 2 == (0 if even else 1)
        self.register_buffer("identity_features", (~moves).nonzero().flatten())
        self.register_buffer("transform_features", moves.nonzero().flatten())
        count = len(self.transform_features)
        self.transform_net = ResidualNet(features - count, count * (3 * BINS - 1))

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        identity_split, transform_split = (
            inputs[:, i] for i in (self.identity_features, self.transform_features)
        )
        params = self.transform_net(identity_split, context).view(*transform_split.shape, -1)
        widths, heights, derivatives = params.split([BINS, BINS, BINS - 1], -1)
        widths, heights = widths / math.sqrt(HIDDEN), heights / math.sqrt(HIDDEN)
        moved, logabsdet = unconstrained_spline(transform_split, widths, heights, derivatives)
        outputs = torch.empty_like(inputs)
        outputs[:, self.identity_features], outputs[:, self.transform_features] = identity_split, moved
        return outputs, logabsdet.sum(1)


Coupling = PiecewiseRationalQuadraticCouplingTransform


class ActNorm(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.log_scale = nn.Parameter(-0.1 + 0.2 * torch.randn(features))
        self.shift = nn.Parameter(0.2 * torch.randn(features))

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        return self.log_scale.exp() * inputs + self.shift, self.log_scale.sum() * inputs.new_ones(len(inputs))


class LULinear(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.features, count = features, features * (features - 1) // 2
        self.lower_entries = nn.Parameter(0.15 * torch.randn(count))
        self.upper_entries = nn.Parameter(0.15 * torch.randn(count))
        self.unconstrained_upper_diag = nn.Parameter(0.5 + 0.3 * torch.randn(features))
        self.bias = nn.Parameter(0.2 * torch.randn(features))

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        size = self.features
        diagonal = F.softplus(self.unconstrained_upper_diag) + MIN_DIAGONAL
        lower, upper = torch.eye(size).to(inputs), torch.diag(diagonal)
        lower[tuple(torch.tril_indices(size, size, -1))] = self.lower_entries
        upper[tuple(torch.triu_indices(size, size, 1))] = self.upper_entries
        outputs = F.linear(F.linear(inputs, upper), lower, self.bias)
        return outputs, diagonal.log().sum() * inputs.new_ones(len(inputs))


class CompositeTransform(nn.Module):
    def __init__(self, transforms: list | tuple):
        super().__init__()
        self._transforms = nn.ModuleList(transforms)

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        outputs, total = inputs, inputs.new_zeros(len(inputs))
        for transform in self._transforms:
            outputs, logabsdet = transform(outputs, context)
            total = total + logabsdet
        return outputs, total


class MultiscaleCompositeTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self._transforms, features = nn.ModuleList(), FEATURES
        for _ in range(LEVELS):
            made = [
                (ActNorm(features), LULinear(features), Coupling(features, i % 2 == 0)) for i in range(STEPS)
            ]
            steps = [CompositeTransform(step) for step in made]
            self._transforms.append(CompositeTransform(steps))
            features = features // 2

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        hiddens, total, gone = inputs, inputs.new_zeros(len(inputs)), []
        for i, transform in enumerate(self._transforms):
            hiddens, logabsdet = transform(hiddens, context)
            total = total + logabsdet
            if i < LEVELS - 1:
                outputs, hiddens = hiddens.chunk(2, dim=1)
                gone.append(outputs)
        return torch.cat([*gone, hiddens], dim=1), total


class ConditionalDiagonalNormal(nn.Module):
    def __init__(self):
        super().__init__()
        self._context_encoder = linear(CONTEXT, 2 * FEATURES, 0.3)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        means, log_stds = self._context_encoder(context).chunk(2, dim=1)
        squares = ((inputs - means) * torch.exp(-log_stds)) ** 2
        return -0.5 * squares.sum(1) - log_stds.sum(1) - 0.5 * FEATURES * math.log(2 * math.pi)


class Flow(nn.Module):
    """[N, FEATURES] and [N, SUMMARY] -> the log-likelihood of each sample, and its noise."""

    def __init__(self):
        super().__init__()
        self._transform, self._distribution = MultiscaleCompositeTransform(), ConditionalDiagonalNormal()
        self._embedding_net = nn.Sequential(linear(SUMMARY, 15), nn.SiLU(), linear(15, CONTEXT))

    def forward(self, inputs: Tensor, context: Tensor) -> Moved:
        embedded = self._embedding_net(context)
        noise, logabsdet = self._transform(inputs, embedded)
        return self._distribution(noise, embedded) + logabsdet, noise


def waves() -> tuple[dict[str, Tensor], Tensor]:
    context = torch.randn(SAMPLES, SUMMARY)
    size, speed, phase, trend = (x[:, None] for x in context[:, :4].T)
    time = torch.linspace(-1, 1, FEATURES)
    wave = (1 + 0.4 * size) * torch.sin((3 + speed) * time + phase) + 0.5 * trend * time
    return {"inputs": wave + 0.6 * torch.randn_like(wave), "context": context}, 0.5 + torch.rand(SAMPLES)


def negative_log_likelihood(outputs: Moved, weight: Tensor) -> Tensor:
    return -(weight * outputs[0]).mean() / FEATURES / 4
