"""A small PaiNN: scalar and vector features of atoms, messages between neighbours, energies and forces."""

from collections.abc import Callable
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, BASIS, CUTOFF, SKIN, SPECIES = 16, 3, 12, 3.0, 0.6, 10


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer and shift count."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight, gain=0.8)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.8)


def scatter_add(x: Tensor, index: Tensor, size: int) -> Tensor:
    """The sums of the rows of ``x`` that have the same index."""
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


class Dense(nn.Linear):
    """A linear layer and what bends it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, activation: Callable | None = None):
        super().__init__(inputs, outputs, bias)
        self.activation = activation or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


class GaussianRBF(nn.Module):
    """Bells at even distances, each as wide as two neighbours are apart."""

    def __init__(self, n_rbf: int, cutoff: float):
        super().__init__()
        offset = torch.linspace(0.0, cutoff, n_rbf)
        self.register_buffer("offsets", offset)
        self.register_buffer("widths", (offset[1] - offset[0]).abs() * torch.ones_like(offset))

    def forward(self, d: Tensor) -> Tensor:
        return torch.exp(-0.5 / self.widths**2 * (d[..., None] - self.offsets) ** 2)


class CosineCutoff(nn.Module):
    """From one to zero at the cutoff, and zero from there on."""

    def __init__(self, cutoff: float):
        super().__init__()
        self.register_buffer("cutoff", torch.tensor([cutoff]))

    def forward(self, d: Tensor) -> Tensor:
        return 0.5 * (torch.cos(d * pi / self.cutoff) + 1) * (d < self.cutoff)


class PairwiseDistances(nn.Module):
    """The vectors from the atoms i to their neighbours j; offsets lead into other cells."""

    def forward(self, positions: Tensor, offsets: Tensor, idx_i: Tensor, idx_j: Tensor) -> Tensor:
        return positions[idx_j] - positions[idx_i] + offsets


class PaiNNInteraction(nn.Module):
    """What the neighbours tell: scalars, directions and their own vectors."""

    def __init__(self, width: int):
        super().__init__()
        self.interatomic_context_net = nn.Sequential(
            Dense(width, width, activation=F.silu), Dense(width, 3 * width)
        )

    def forward(self, q: Tensor, mu: Tensor, filters: Tensor, directions: Tensor, *idx: Tensor) -> tuple:
        idx_i, idx_j = idx
        x = filters * self.interatomic_context_net(q)[idx_j]
        dq, from_directions, from_vectors = x.chunk(3, -1)
        dmu = from_directions * directions[..., None] + from_vectors * mu[idx_j]
        return q + scatter_add(dq, idx_i, len(q)), mu + scatter_add(dmu, idx_i, len(q))


class PaiNNMixing(nn.Module):
    """Within each atom scalars and vectors meet: by the vectors' norms, gates and scalar products."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.intraatomic_context_net = nn.Sequential(
            Dense(2 * width, width, activation=F.silu), Dense(width, 3 * width)
        )
        self.mu_channel_mix = Dense(width, 2 * width, bias=False)
        self.epsilon = epsilon

    def forward(self, q: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        mu_v, mu_w = self.mu_channel_mix(mu).chunk(2, -1)
        norm = torch.sqrt((mu_v**2).sum(1, keepdim=True) + self.epsilon)
        dq, dmu, dqmu = self.intraatomic_context_net(torch.cat([q, norm], -1)).chunk(3, -1)
        return q + dq + dqmu * (mu_v * mu_w).sum(1, keepdim=True), mu + dmu * mu_w


class PaiNN(nn.Module):
    """The kinds of atoms [N] and vectors to neighbours [E, 3] -> scalar features [N, F]."""

    def __init__(self, width: int, layers: int, epsilon: float = 1e-8):
        super().__init__()
        self.width = width
        self.radial_basis, self.cutoff_fn = GaussianRBF(BASIS, CUTOFF), CosineCutoff(CUTOFF)
        self.embedding = nn.Embedding(SPECIES, width, padding_idx=0)
        self.filter_net = Dense(BASIS, layers * 3 * width)
        self.interactions = nn.ModuleList(PaiNNInteraction(width) for _ in range(layers))
        self.mixing = nn.ModuleList(PaiNNMixing(width, epsilon) for _ in range(layers))

    def forward(self, kinds: Tensor, vectors: Tensor, idx_i: Tensor, idx_j: Tensor) -> Tensor:
        d = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        filters = self.filter_net(self.radial_basis(d)) * self.cutoff_fn(d)[..., None]
        q = self.embedding(kinds)[:, None]
        mu = q.new_zeros(len(kinds), 3, self.width)
        own = filters.split(3 * self.width, -1)
        for interaction, mixing, part in zip(self.interactions, self.mixing, own, strict=True):
            q, mu = mixing(*interaction(q, mu, part, vectors / d, idx_i, idx_j))
        return q[:, 0]


class Atomwise(nn.Module):
    """A share of the energy for each atom, summed by molecule."""

    def __init__(self, width: int):
        super().__init__()
        self.outnet = nn.Sequential(Dense(width, width // 2, activation=F.silu), Dense(width // 2, 1))

    def forward(self, q: Tensor, idx_m: Tensor) -> Tensor:
        return scatter_add(self.outnet(q)[:, 0], idx_m, int(idx_m[-1]) + 1)


class Forces(nn.Module):
    """The negative slope of the energy, itself to be differentiated."""

    def forward(self, energy: Tensor, positions: Tensor) -> Tensor:
        return -torch.autograd.grad(energy, positions, torch.ones_like(energy), create_graph=True)[0]


class AddOffsets(nn.Module):
    """The mean energy of an atom, as often as there are atoms."""

    def __init__(self, mean: float):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, energy: Tensor, idx_m: Tensor) -> Tensor:
        return energy + self.mean * torch.bincount(idx_m).to(energy)


class NeuralNetworkPotential(nn.Module):
    """Atoms and pairs -> energies and forces; the mean that the targets lack is given back in eval mode."""

    def __init__(self):
        super().__init__()
        self.input_modules = nn.ModuleList([PairwiseDistances()])
        self.representation = PaiNN(WIDTH, LAYERS)
        self.output_modules = nn.ModuleList([Atomwise(WIDTH), Forces()])
        self.postprocessors = nn.ModuleList([AddOffsets(-0.7)])
        self.apply(varied)

    def forward(self, kinds: Tensor, positions: Tensor, offsets: Tensor, *idx: Tensor) -> dict[str, Tensor]:
        idx_i, idx_j, idx_m = idx
        with torch.enable_grad():
            positions = positions if positions.requires_grad else positions.detach().requires_grad_()
            vectors = self.input_modules[0](positions, offsets, idx_i, idx_j)
            energy = self.output_modules[0](self.representation(kinds, vectors, idx_i, idx_j), idx_m)
            forces = self.output_modules[1](energy, positions)
            if not self.training:
                energy = self.postprocessors[0](energy, idx_m)
        return {"energy": energy, "forces": forces}


def molecules() -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Two molecules and a crystal on shaken grids; the list of pairs reaches a skin beyond the cutoff."""
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).float()
    cells = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3).float() * torch.tensor([3.9, 2.6, 2.6])
    atoms, pairs, shifts, members, start = [], [], [], [0] * 5 + [1] * 6 + [2] * 3, 0
    for size, images in ((5, cells[13:14]), (6, cells[13:14]), (3, cells)):
        r = 1.3 * grid[torch.randperm(12)[:size]] + 0.12 * torch.randn(size, 3)
        d = (r - r[:, None] + images[:, None, None]).norm(dim=-1)
        image, i, j = ((d < CUTOFF + SKIN) & (d > 1e-3)).nonzero().T
        atoms.append(r)
        pairs.append(torch.stack([i, j]) + start)
        shifts.append(images[image])
        start += size
    positions, offsets, (idx_i, idx_j) = torch.cat(atoms), torch.cat(shifts), torch.cat(pairs, 1)
    kinds, idx_m = torch.tensor([1, 6, 7, 8])[torch.randint(4, (start,))], torch.tensor(members)
    r = positions.clone().requires_grad_()
    d = (r[idx_j] - r[idx_i] + offsets).norm(dim=1)
    shares = 0.1 * (kinds[idx_i] * kinds[idx_j]).sqrt() * (torch.exp(-2 * d) - 0.5 * torch.exp(-d))
    energy = scatter_add(shares, idx_m[idx_i], 3)
    target = energy.detach(), -torch.autograd.grad(energy.sum(), r)[0]
    return (kinds, positions, offsets, idx_i, idx_j, idx_m), target


def matched(outputs: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The squared errors of energies and of forces."""
    return 0.01 * F.mse_loss(outputs["energy"], target[0]) + 0.1 * F.mse_loss(outputs["forces"], target[1])
