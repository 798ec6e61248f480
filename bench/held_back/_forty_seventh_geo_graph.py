"""A small PaiNN potential: energies, dipoles and forces of padded molecules by equivariant messages."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ELEMENTS, ATOMS, MOLECULES, CUTOFF = 9, 7, 5, 4.0
BASIS, RADIAL, LAYERS, SCALARS, VECTORS = 20, 11, 3, 14, 9


def scatter_add(x: Tensor, idx: Tensor, dim_size: int) -> Tensor:
    return x.new_zeros(dim_size, *x.shape[1:]).index_add(0, idx, x)


class Dense(nn.Linear):
    """A linear layer and an activation."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True, activation=None):
        super().__init__(n_in, n_out, bias)
        self.activation = activation or nn.Identity()
        nn.init.normal_(self.weight, std=0.8 / math.sqrt(n_in))
        if bias:
            nn.init.normal_(self.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class BesselRBF(nn.Module):
    def __init__(self, n_rbf: int, cutoff: float):
        super().__init__()
        self.register_buffer("freqs", torch.arange(1, n_rbf + 1) * math.pi / cutoff)

    def forward(self, d_ij: Tensor) -> Tensor:
        return torch.sin(d_ij[..., None] * self.freqs) / d_ij[..., None]


class CosineCutoff(nn.Module):
    def __init__(self, cutoff: float):
        super().__init__()
        self.cutoff = cutoff

    def forward(self, d_ij: Tensor) -> Tensor:
        return 0.5 * (torch.cos(d_ij * math.pi / self.cutoff) + 1.0) * (d_ij < self.cutoff)


class PaiNNInteraction(nn.Module):
    """Messages between atoms; q is [n, 1, F] and mu [n, 3, F]."""

    def __init__(self, n_atom_basis: int):
        super().__init__()
        first = Dense(n_atom_basis, n_atom_basis, activation=F.silu)
        self.interatomic_context_net = nn.Sequential(first, Dense(n_atom_basis, 3 * n_atom_basis))

    def forward(self, q: Tensor, mu: Tensor, w_ij: Tensor, dir_ij: Tensor, idx_i: Tensor, idx_j: Tensor):
        x = self.interatomic_context_net(q)
        dq, dmu_r, dmu_mu = torch.chunk(w_ij * x[idx_j], 3, dim=-1)
        dq = scatter_add(dq, idx_i, len(q))
        dmu = scatter_add(dmu_r * dir_ij[..., None] + dmu_mu * mu[idx_j], idx_i, len(q))
        return q + dq, mu + dmu


class PaiNNMixing(nn.Module):
    """Mixes scalars and vectors within each atom."""

    def __init__(self, n_atom_basis: int, epsilon: float = 1e-4):
        super().__init__()
        first = Dense(2 * n_atom_basis, n_atom_basis, activation=F.silu)
        self.intraatomic_context_net = nn.Sequential(first, Dense(n_atom_basis, 3 * n_atom_basis))
        self.mu_channel_mix = Dense(n_atom_basis, 2 * n_atom_basis, bias=False)
        self.epsilon = epsilon

    def forward(self, q: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        mu_v, mu_w = torch.chunk(self.mu_channel_mix(mu), 2, dim=-1)
        mu_vn = torch.sqrt(torch.sum(mu_v**2, dim=-2, keepdim=True) + self.epsilon)
        x = self.intraatomic_context_net(torch.cat([q, mu_vn], dim=-1))
        dq, dmu, dqmu = torch.chunk(x, 3, dim=-1)
        dqmu = dqmu * torch.sum(mu_v * mu_w, dim=1, keepdim=True)
        return q + dq + dqmu, mu + dmu * mu_w


class PaiNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(ELEMENTS + 1, BASIS, padding_idx=0)
        self.radial_basis, self.cutoff_fn = BesselRBF(RADIAL, CUTOFF), CosineCutoff(CUTOFF)
        self.filter_net = Dense(RADIAL, LAYERS * 3 * BASIS)
        self.interactions = nn.ModuleList(PaiNNInteraction(BASIS) for _ in range(LAYERS))
        self.mixing = nn.ModuleList(PaiNNMixing(BASIS) for _ in range(LAYERS))

    def forward(self, z: Tensor, r_ij: Tensor, idx_i: Tensor, idx_j: Tensor) -> tuple[Tensor, Tensor]:
        d_ij = torch.norm(r_ij, dim=1, keepdim=True)
        dir_ij = r_ij / d_ij
        phi_ij, fcut = self.radial_basis(d_ij), self.cutoff_fn(d_ij)
        filters = self.filter_net(phi_ij) * fcut[..., None]
        q = self.embedding(z)[:, None]
        mu = q.new_zeros(len(q), 3, BASIS)
        for w_ij, interaction, mixing in zip(
            filters.chunk(LAYERS, -1), self.interactions, self.mixing, strict=True
        ):
            q, mu = interaction(q, mu, w_ij, dir_ij, idx_i, idx_j)
            q, mu = mixing(q, mu)
        return q.squeeze(1), mu


class GatedEquivariantBlock(nn.Module):
    def __init__(self, n_sin: int, n_vin: int, n_sout: int, n_vout: int, n_hidden: int, sactivation=None):
        super().__init__()
        self.n_sout, self.n_vout, self.sactivation = n_sout, n_vout, sactivation
        self.mix_vectors = Dense(n_vin, 2 * n_vout, bias=False)
        first = Dense(n_sin + n_vout, n_hidden, activation=F.silu)
        self.scalar_net = nn.Sequential(first, Dense(n_hidden, n_sout + n_vout))

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        vectors_v, vectors_w = torch.chunk(self.mix_vectors(vectors), 2, dim=-1)
        x = self.scalar_net(torch.cat([scalars, torch.norm(vectors_v, dim=-2)], dim=-1))
        s_out, gate = torch.split(x, [self.n_sout, self.n_vout], dim=-1)
        v_out = gate[:, None] * vectors_w
        return (self.sactivation(s_out) if self.sactivation else s_out), v_out


class Atomwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.outnet = nn.Sequential(Dense(BASIS, BASIS // 2, activation=F.silu), Dense(BASIS // 2, 1))

    def forward(self, q: Tensor, idx_m: Tensor, maxm: int) -> Tensor:
        return scatter_add(self.outnet(q), idx_m, maxm).squeeze(-1)


class DipoleMoment(nn.Module):
    def __init__(self):
        super().__init__()
        first = GatedEquivariantBlock(BASIS, BASIS, SCALARS, VECTORS, 16, F.silu)
        self.outnet = nn.ModuleList([first, GatedEquivariantBlock(SCALARS, VECTORS, 1, 1, 12)])

    def forward(self, q: Tensor, mu: Tensor, positions: Tensor, idx_m: Tensor, maxm: int) -> Tensor:
        for block in self.outnet:
            q, mu = block(q, mu)
        return scatter_add(positions * q + mu.squeeze(-1), idx_m, maxm)


class Forces(nn.Module):
    def forward(self, energy: Tensor, positions: Tensor, create_graph: bool) -> Tensor:
        grads = torch.autograd.grad(energy.sum(), positions, create_graph=create_graph, retain_graph=True)
        return -grads[0]


class NeuralNetworkPotential(nn.Module):
    """Atomic numbers [N, A] (0 where there is no atom) and positions [N, A, 3] -> properties."""

    def __init__(self):
        super().__init__()
        self.representation = PaiNN()
        self.output_modules = nn.ModuleList([Atomwise(), DipoleMoment(), Forces()])

    def neighbors(self, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        number = mask.flatten().cumsum(0).view(mask.shape) - 1
        near = torch.cdist(positions, positions) < CUTOFF
        near = near & mask[:, :, None] & mask[:, None] & ~torch.eye(mask.shape[1]).to(mask)
        m, i, j = near.nonzero(as_tuple=True)
        return number[m, i], number[m, j]

    def forward(self, z: Tensor, positions: Tensor) -> dict[str, Tensor]:
        create_graph, mask, (atomwise, dipole, forces) = torch.is_grad_enabled(), z > 0, self.output_modules
        idx_m = mask.nonzero()[:, 0]
        idx_i, idx_j = self.neighbors(mask, positions.detach())
        with torch.enable_grad():
            if not positions.requires_grad:
                positions = positions.detach().requires_grad_()
            flat = positions[mask]
            q, mu = self.representation(z[mask], flat[idx_j] - flat[idx_i], idx_i, idx_j)
            energy = atomwise(q, idx_m, len(z))
            found = {"energy": energy, "dipole": dipole(q, mu, flat, idx_m, len(z))}
            found["forces"] = forces(energy, positions, create_graph)
        return found if create_graph else {key: value.detach() for key, value in found.items()}


def molecules() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Bent chains of four to seven atoms, with springs' energies and forces and dipoles of fixed charges."""
    z = torch.randint(1, ELEMENTS + 1, (MOLECULES, ATOMS))
    count = torch.randint(4, ATOMS + 1, (MOLECULES, 1))
    mask = torch.arange(ATOMS) < count
    turn = torch.arange(ATOMS) * (0.8 + 0.4 * torch.rand(MOLECULES, 1))
    chain = torch.stack([1.3 * turn.cos(), 1.3 * turn.sin(), 0.7 * turn], -1) + 0.15 * torch.randn(
        1, ATOMS, 3
    )
    chain = (chain + 0.3 * torch.randn(MOLECULES, 1, 3)) * mask[..., None]
    z, charge = z * mask, torch.sin(z * 1.0) * mask
    energy = 0.3 * charge.sum(1) + 0.05 * chain.square().sum((1, 2))
    return (z, chain), (energy, 0.3 * (charge[..., None] * chain).sum(1), -0.1 * chain)


def properties(outputs: dict[str, Tensor], target: tuple[Tensor, ...]) -> Tensor:
    energy, dipole, forces = target
    loss = F.mse_loss(outputs["energy"], energy) + F.mse_loss(outputs["dipole"], dipole)
    return (loss + 5 * F.mse_loss(outputs["forces"], forces)) / 20
