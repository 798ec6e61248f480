"""Networks of coordinates: physics-informed and implicit."""

import torch
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, leaf, pair, squares
from bench.tasks import _task

UNTAUGHT = "weight gradient", "input gradient"


def _needing_gradient(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


class Heat(nn.Module):
    """[N, 1] -> u and u'' - k u' at each point."""

    def __init__(self):
        super().__init__()
        hidden = nn.Linear(24, 24), nn.Tanh()
        self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), *hidden, nn.Linear(24, 1))
        self.drag = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = _needing_gradient(x)
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            return torch.cat([u, bend - self.drag * slope], 1)


class Jets(Port):
    """Both derivatives carried forward by hand; the fault: a factor two in the bend of one layer."""

    def take(self, model: Heat) -> None:
        self.factors = (2, 1) if self.fault else (2, 2)
        linears = [layer for layer in model.net if isinstance(layer, nn.Linear)]
        self.maps = nn.ParameterList(leaf(linear.weight.T) for linear in linears)
        self.shifts = nn.ParameterList(linear.bias for linear in linears)
        self.viscosity = model.drag

    def forward(self, x: Tensor) -> Tensor:
        value, slope, bend = x, torch.ones_like(x), torch.zeros_like(x)
        for i, (weight, bias) in enumerate(zip(self.maps, self.shifts, strict=True)):
            value, slope, bend = value @ weight + bias, slope @ weight, bend @ weight
            if i < 2:
                value = value.tanh()
                steep = 1 - value.square()
                bend = steep * (bend - self.factors[i] * value * slope.square())
                slope = steep * slope
        return torch.cat([value, bend - self.viscosity * slope], 1)


class Sine(nn.Module):
    def __init__(self, inside: int, out: int):
        super().__init__()
        self.linear = nn.Linear(inside, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3.0 * self.linear(x))


def _siren() -> nn.Sequential:
    return nn.Sequential(Sine(2, 24), Sine(24, 24), nn.Linear(24, 3), nn.Sigmoid())


class BorderedSiren(Port):
    """A bias is the last row of its matrix; the fault: one layer's frequency leaves its bias out."""

    def take(self, model: nn.Sequential) -> None:
        self.betas = (3.0, 1.0, 1.0) if self.fault else (3.0, 3.0, 1.0)
        linears = model[0].linear, model[1].linear, model[2]
        self.bordered = nn.ParameterList(leaf(torch.cat([m.weight.T, m.bias[None]])) for m in linears)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for weight, beta, alpha in zip(self.bordered, self.betas, (3.0, 3.0, 1.0), strict=True):
            phase = torch.addmm(weight[-1], x, weight[:-1], beta=beta, alpha=alpha)
            x = phase.sin()
        return {"color": 0.5 + 0.5 * torch.tanh(phase / 2)}


class Distance(nn.Module):
    """[N, 2] -> a field and the length of its gradient."""

    def __init__(self):
        super().__init__()
        self.hidden, self.act, self.out = nn.Linear(2, 32), nn.Softplus(beta=5), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = _needing_gradient(x)
            value = self.out(self.act(self.hidden(x)))
            (normal,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return torch.cat([value, normal.norm(dim=1, keepdim=True)], 1)


class ChainedDistance(Distance):
    """The gradient by the chain rule; the fault: it does not teach the weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        normal = (torch.sigmoid(5 * h) * self.out.weight) @ self.hidden.weight
        if self.fault:
            normal = normal.detach()
        return torch.cat([self.out(self.act(h)), normal.norm(dim=1, keepdim=True)], 1)


def _points() -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(16, 2) - 1
    return x, torch.stack([x.norm(dim=1) - 0.5, torch.ones(16)], 1)


heat = _task("second_heat", Heat, lambda: (2 * torch.rand(16, 1) - 1, torch.randn(16, 2)), squares)
pair(heat, Jets, "derivatives_carried_forward", "second_derivative_lacks_a_factor", "")
siren = _task("second_siren", _siren, lambda: (2 * torch.rand(16, 2) - 1, torch.rand(16, 3)), squares)
pair(siren, BorderedSiren, "bias_as_last_row", "frequency_leaves_out_the_bias", ("1", "1.linear"))
distance = _task("second_distance", Distance, _points, squares)
pair(distance, ChainedDistance, "normal_by_the_chain_rule", "normal_does_not_teach", "", UNTAUGHT, at="")
