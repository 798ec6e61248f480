"""Energies and forces of molecules: continuous filters over distances."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, leaf, parts, pile, wrong
from bench.tasks import _task

W, SPREAD, MEAN = 16, 2.5, -1.3  # energies are learnt standardised


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) - math.log(2)


class Basis(nn.Module):
    def forward(self, distance: Tensor) -> Tensor:
        centers = torch.linspace(0, 4, 8, dtype=distance.dtype, device=distance.device)
        return torch.exp(-1.5 * (distance[..., None] - centers).square())


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(8, W), Shifted(), nn.Linear(W, W))
        self.inside = nn.Linear(W, W, bias=False)
        self.out = nn.Sequential(nn.Linear(W, W), Shifted(), nn.Linear(W, W))

    def forward(self, x: Tensor, to: Tensor, of: Tensor, basis: Tensor, taper: Tensor) -> Tensor:
        message = self.inside(x)[of] * self.filter(basis) * taper[:, None]
        return x + self.out(torch.zeros_like(x).index_add(0, to, message))


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.basis = nn.Embedding(6, W, padding_idx=0), Basis()
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))
        self.readout = nn.Sequential(nn.Linear(W, 16), Shifted(), nn.Linear(16, 1))

    def energy(self, kinds: Tensor, places: Tensor) -> Tensor:
        real = kinds > 0
        other = ~torch.eye(kinds.shape[1], dtype=torch.bool, device=kinds.device)
        n, i, j = (real[:, :, None] & real[:, None] & other).nonzero(as_tuple=True)
        distance = (places[n, i] - places[n, j]).square().sum(1).sqrt()
        taper = 0.5 * (torch.cos(distance * math.pi / 5) + 1) * (distance < 5)
        basis, x = self.basis(distance), self.embed(kinds).flatten(0, 1)
        for interaction in self.interactions:
            x = interaction(x, n * kinds.shape[1] + i, n * kinds.shape[1] + j, basis, taper)
        return (self.readout(x).view(kinds.shape) * real).sum(1)

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = places if places.requires_grad else places.detach().requires_grad_()
            energy = self.energy(kinds, places)
            forces = -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]
        return (energy, forces) if self.training else (SPREAD * energy + MEAN, SPREAD * forces)


class DenseMolecules(Port):
    """Every atom against every atom under a mask; matrices of one shape in one tensor."""

    def take(self, model: Molecules) -> None:
        layers = model.interactions
        self.kinds = leaf(model.embed.weight)
        self.enter = pile(layer.filter[0].weight.T for layer in layers)
        linears = [(layer.filter[0], layer.filter[2], layer.out[0], layer.out[2]) for layer in layers]
        self.square = pile(torch.stack([linear.weight.T for linear in four[1:]]) for four in linears)
        self.biases = pile(torch.stack([linear.bias for linear in four]) for four in linears)
        self.inside = pile(layer.inside.weight for layer in layers)
        self.last = nn.ModuleList(model.readout[::2])

    def soft(self, x: Tensor, at: str = "") -> Tensor:
        shift = 0 if at == "filter1" and self.fault == "one_softplus_not_shifted" else math.log(2)
        return torch.logaddexp(x, torch.zeros_like(x)) - shift

    def energy(self, kinds: Tensor, places: Tensor) -> Tensor:
        real, unit = (kinds > 0).to(places.dtype), torch.eye(kinds.shape[1]).to(places)
        distance = ((places[:, :, None] - places[:, None]).square().sum(3) + unit).sqrt() * (1 - unit)
        width = 0.75 if self.fault == "gaussians_too_wide" else 1.5
        basis = torch.exp(-width * (distance[..., None] - torch.arange(8).to(places) * 4 / 7).square())
        taper = torch.cos(distance * math.pi / 10).square() * (distance < 5)
        known = real[:, :, None] * real[:, None] * taper
        x = self.kinds[kinds] * real[..., None]
        for i, ((w2, w3, w4), (b1, b2, b3, b4)) in enumerate(zip(self.square, self.biases, strict=True)):
            mask = known if i == 0 and self.fault == "atoms_hear_themselves" else known * (1 - unit)
            strength = self.soft(basis @ self.enter[i] + b1, f"filter{i}") @ w2 + b2
            heard = torch.einsum("nijw,nij,njv,wv->niw", strength, mask, x, self.inside[i])
            x = x + self.soft(heard @ w3 + b3) @ w4 + b4
        return torch.einsum("nao,na->n", self.last[1](self.soft(self.last[0](x))), real)

    def forward(self, kinds: Tensor, places: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            places = places if places.requires_grad else places.detach().requires_grad_()
            energy = self.energy(kinds, places)
            (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        slope = slope.detach() if self.fault == "forces_teach_nothing" else slope
        if not self.training:
            energy = energy * SPREAD + MEAN
            slope = slope if self.fault == "forces_stay_standardised" else slope * SPREAD
        return {"energy": energy, "forces": -slope}


def _both(outputs: tuple | dict, targets: Tensor) -> Tensor:
    energy, forces = parts(outputs)
    distance = F.mse_loss(energy, targets[:, 0, 0].to(energy))
    return 0.01 * distance + F.mse_loss(forces, targets[:, 1:].to(forces))


def _molecules() -> tuple[dict[str, Tensor], Tensor]:
    kinds = torch.randint(1, 6, (6, 7)) * (torch.arange(7) < torch.randint(4, 8, (6, 1)))
    return {"kinds": kinds, "places": 1.5 * torch.randn(6, 7, 3)}, torch.randn(6, 8, 3)


wrong(
    _task("fourth_molecules", Molecules, _molecules, _both),
    DenseMolecules,
    one_softplus_not_shifted=("constant in one activation", "interactions.1.filter.1"),
    atoms_hear_themselves=("mask in one layer", "interactions.0"),
    gaussians_too_wide=("constant", "basis"),
    forces_teach_nothing=("detach", "", ("weight gradient", "input gradient")),
    forces_stay_standardised=("scale of one output in eval mode", "", "eval"),
)
