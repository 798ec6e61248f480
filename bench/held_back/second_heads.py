"""Networks with two branches or two heads, and networks whose weights are normalised."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bench.held_back._second_pairs import Port, leaf, pair
from bench.tasks import _classes, _task


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        pool = nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.tower = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), *pool, nn.Linear(32, 16))
        self.score = nn.Linear(16, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.score((self.tower(left) - self.tower(right)).abs())


class OneBatch(Port):
    """Both views in one batch; the fault: they share the statistics of the norm."""

    def take(self, model: Siamese) -> None:
        self.see, self.norm, _, self.pool, _, self.embed = model.tower
        self.judge = model.score

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        seen = self.see(torch.cat([left, right]))
        views = [seen] if self.fault else seen.chunk(2)
        seen = torch.cat([self.norm(view) for view in views]).relu()
        first, second = self.embed(self.pool(seen).flatten(1)).unflatten(0, (2, -1))
        return self.judge(torch.maximum(first, second) - torch.minimum(first, second))


class Reverse(nn.Module):
    """The identity whose gradient comes back as its negative, halved."""

    def forward(self, x: Tensor) -> Tensor:
        return (1.5 * x).detach() - 0.5 * x


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 12, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(2), nn.Flatten())
        self.label, self.reverse, self.domain = nn.Linear(24, 3), Reverse(), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.features(x)
        return {"label": self.label(h), "domain": self.domain(self.reverse(h))}


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class JoinedHeads(Port):
    """Both heads in one matrix, a custom function; the fault: its gradient is not halved."""

    def take(self, model: Adversarial) -> None:
        self.strength = 1.0 if self.fault else 0.5
        self.kernel, self.level = leaf(model.features[0].weight.flatten(1).T), model.features[0].bias
        self.heads = leaf(torch.cat([model.label.weight, model.domain.weight]))
        self.shift = leaf(torch.cat([model.label.bias, model.domain.bias]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        near = x.unfold(2, 3, 1).transpose(1, 2).flatten(2)
        h = F.adaptive_max_pool1d((near @ self.kernel + self.level).relu().transpose(1, 2), 2).flatten(1)
        split = torch.stack([h, _Turned.apply(h, self.strength)])
        both = split @ self.heads.T + self.shift
        return both[0, :, :3], both[1, :, 3:]


def _two_losses(outputs: dict | tuple, targets: Tensor) -> Tensor:
    label, domain = outputs.values() if isinstance(outputs, dict) else outputs
    return F.cross_entropy(label, targets[:, 0]) + F.cross_entropy(domain, targets[:, 1])


def _weight_normed() -> nn.Sequential:
    first, second = nn.Linear(12, 24), nn.Linear(24, 24)
    norm = parametrizations.weight_norm
    return nn.Sequential(norm(first), nn.Tanh(), norm(second), nn.Tanh(), nn.Linear(24, 4))


class ScaledOutputs(Port):
    """Outputs scaled, not weights; the fault: one bias is scaled too."""

    def take(self, model: nn.Sequential) -> None:
        self.lengths, self.directions = nn.ParameterList(), nn.ParameterList()
        for layer in (model[0], model[2]):
            norm = layer.parametrizations.weight
            self.lengths.append(leaf(norm.original0.flatten()))
            self.directions.append(leaf(norm.original1))
        self.biases, self.last = nn.ParameterList([model[0].bias, model[2].bias]), model[4]

    def forward(self, x: Tensor) -> Tensor:
        for i, direction in enumerate(self.directions):
            size = torch.einsum("oi,oi->o", direction, direction).sqrt()
            scale = self.lengths[i] / size
            bias = self.biases[i] * scale if self.fault and i == 1 else self.biases[i]
            x = torch.tanh(F.linear(x, direction) * scale + bias)
        return self.last(x)


def _critic() -> nn.Sequential:
    conv = parametrizations.spectral_norm(nn.Conv2d(1, 12, 3, 2, 1))
    return nn.Sequential(conv, nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 1))


class BoundedCritic(Port):
    """The norm divides the output; the fault: what the power iteration finds is not kept."""

    def take(self, model: nn.Sequential) -> None:
        norm = model[0].parametrizations.weight
        self.matrix, self.bias, self.end = leaf(norm.original.flatten(1).T), model[0].bias, model[4]
        self.register_buffer("left", norm[0]._u.clone())
        self.register_buffer("right", norm[0]._v.clone())

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left, self.right
        if self.training:
            with torch.no_grad():
                left = F.normalize(right @ self.matrix, dim=0, eps=1e-12)
                right = F.normalize(self.matrix @ left, dim=0, eps=1e-12)
            if not self.fault:
                self.left, self.right = left, right
        size = right @ self.matrix @ left
        patches = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)
        seen = patches @ self.matrix / size + self.bias
        return self.end(torch.where(seen > 0, seen, 0.2 * seen).mean(1))


def _normed(name: str) -> tuple[str, ...]:
    return name, f"{name}.parametrizations.weight", f"{name}.parametrizations.weight.0"


def _two_labels() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 2, 12), torch.randint(2, (12, 2))


def _views() -> tuple[dict[str, Tensor], Tensor]:
    return {"left": torch.randn(8, 1, 10, 10), "right": 2 * torch.randn(8, 1, 10, 10) + 1}, _classes(8, 2)


def _judged() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 1, 10, 10), 2.0 * torch.randint(2, (8, 1)) - 1


siamese = _task("second_siamese", Siamese, _views)
pair(siamese, OneBatch, "both_views_in_one_batch", "views_share_their_statistics", "tower.1")
domains = _task("second_domains", Adversarial, _two_labels, _two_losses)
pair(domains, JoinedHeads, "reversal_as_custom_function", "gradient_not_halved", "reverse", "input gradient")
early = "forward", "weight gradient"
normed = _task("second_weight_norm", _weight_normed, lambda: (torch.randn(14, 12), _classes(14, 4)))
pair(normed, ScaledOutputs, "weight_norm_of_outputs", "bias_is_scaled_too", _normed("2"), early)
critic = _task("second_critic", _critic, _judged, lambda outputs, y: F.relu(1 - outputs * y).mean())
pair(critic, BoundedCritic, "spectral_norm_of_the_output", "power_iteration_not_kept", _normed("0"), "buffer")
