"""A small SchNet potential: energies and gaps of periodic molecules, and the forces on their atoms."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASIS, FILTERS, GAUSSIANS, INTERACTIONS, MAX_Z = 30, 36, 20, 3, 12
CUTOFF, SKIN, SYSTEMS, SPECIES = 3.6, 0.4, 4, (1, 3, 6, 8, 9, 11)


def scatter_add(x: Tensor, idx_i: Tensor, dim_size: int) -> Tensor:
    """The sums of the rows that have one index."""
    return x.new_zeros(dim_size, *x.shape[1:]).index_add(0, idx_i, x)


def shifted_softplus(x: Tensor) -> Tensor:
    return F.softplus(x) - math.log(2.0)


class Dense(nn.Linear):
    """A linear layer and the activation after it."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True, activation: Callable | None = None):
        super().__init__(n_in, n_out, bias)
        self.activation = nn.Identity() if activation is None else activation
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(n_in))
        if bias:
            nn.init.normal_(self.bias, std=0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.activation(F.linear(inputs, self.weight, self.bias))


def build_mlp(n_in: int, n_hidden: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(Dense(n_in, n_hidden, activation=shifted_softplus), Dense(n_hidden, n_out))


class PairwiseDistances(nn.Module):
    """The vectors from each atom to its neighbours, also to those in the next cells."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        positions = inputs["positions"]
        inputs["r_ij"] = positions[inputs["idx_j"]] - positions[inputs["idx_i"]] + inputs["offsets"]
        return inputs


class GaussianRBF(nn.Module):
    """Gaussians of trained centres and widths."""

    def __init__(self, n_rbf: int, cutoff: float):
        super().__init__()
        offset = torch.linspace(0, cutoff, n_rbf)
        self.n_rbf, width = n_rbf, offset[1] - offset[0]
        self.widths = nn.Parameter(width * (1.5 + 0.5 * torch.rand(n_rbf)))
        self.offsets = nn.Parameter(offset + 0.2 * width * torch.randn(n_rbf))

    def forward(self, inputs: Tensor) -> Tensor:
        coeff = -0.5 / torch.pow(self.widths, 2)
        return torch.exp(coeff * torch.pow(inputs[..., None] - self.offsets, 2))


class CosineCutoff(nn.Module):
    def __init__(self, cutoff: float):
        super().__init__()
        self.register_buffer("cutoff", torch.tensor([cutoff]))

    def forward(self, inputs: Tensor) -> Tensor:
        cutcos = 0.5 * (torch.cos(inputs * math.pi / self.cutoff) + 1.0)
        return cutcos * (inputs < self.cutoff)


class SchNetInteraction(nn.Module):
    """A continuous-filter convolution between linear layers."""

    def __init__(self, n_atom_basis: int, n_rbf: int, n_filters: int):
        super().__init__()
        self.in2f = Dense(n_atom_basis, n_filters, bias=False)
        self.f2out = build_mlp(n_filters, n_atom_basis, n_atom_basis)
        self.filter_network = build_mlp(n_rbf, n_filters, n_filters)

    def forward(self, x: Tensor, f_ij: Tensor, idx_i: Tensor, idx_j: Tensor, rcut_ij: Tensor) -> Tensor:
        x = self.in2f(x)
        w_ij = self.filter_network(f_ij) * rcut_ij[:, None]
        x = scatter_add(x[idx_j] * w_ij, idx_i, dim_size=x.shape[0])
        return self.f2out(x)


class SchNet(nn.Module):
    """The atoms' representation after some interactions."""

    def __init__(self):
        super().__init__()
        self.radial_basis, self.cutoff_fn = GaussianRBF(GAUSSIANS, CUTOFF), CosineCutoff(CUTOFF)
        self.embedding = nn.Embedding(MAX_Z, BASIS, padding_idx=0)
        nn.init.normal_(self.embedding.weight)
        blocks = [SchNetInteraction(BASIS, GAUSSIANS, FILTERS) for _ in range(INTERACTIONS)]
        self.interactions = nn.ModuleList(blocks)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        idx_i, idx_j = inputs["idx_i"], inputs["idx_j"]
        d_ij = torch.norm(inputs["r_ij"], dim=1)
        f_ij, rcut_ij = self.radial_basis(d_ij), self.cutoff_fn(d_ij)
        x = self.embedding(inputs["atomic_numbers"])
        for interaction in self.interactions:
            x = x + interaction(x, f_ij, idx_i, idx_j, rcut_ij)
        inputs["scalar_representation"] = x
        return inputs


class Atomwise(nn.Module):
    """A property as the sum or the mean of what each atom of the molecule contributes."""

    def __init__(self, n_in: int, n_hidden: int, output_key: str, aggregation_mode: str = "sum"):
        super().__init__()
        self.output_key, self.aggregation_mode = output_key, aggregation_mode
        self.outnet = build_mlp(n_in, n_hidden, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        y = self.outnet(inputs["scalar_representation"]).squeeze(-1)
        y = scatter_add(y, inputs["idx_m"], dim_size=int(inputs["idx_m"][-1]) + 1)
        if self.aggregation_mode == "avg":
            y = y / inputs["n_atoms"]
        inputs[self.output_key] = y
        return inputs


class Forces(nn.Module):
    """Minus the gradient of the energy."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        energy, positions = inputs["energy"], inputs["positions"]
        (slope,) = torch.autograd.grad([energy], [positions], [torch.ones_like(energy)], create_graph=True)
        inputs["forces"] = -slope
        return inputs


class AddOffsets(nn.Module):
    """Adds the mean energy of an atom, and the energies of the single atoms, to the energy."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", 0.1 + 0.05 * torch.rand(1))
        self.register_buffer("atomref", 0.1 * torch.randn(MAX_Z))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        energy = inputs["energy"] + self.mean * inputs["n_atoms"]
        y0 = self.atomref[inputs["atomic_numbers"]]
        inputs["energy"] = energy + scatter_add(y0, inputs["idx_m"], dim_size=energy.shape[0])
        return inputs


class NeuralNetworkPotential(nn.Module):
    """Atoms and their neighbours, batched by index -> energy [M], gap [M] and forces [N, 3]."""

    def __init__(self):
        super().__init__()
        self.model_outputs = ("energy", "gap", "forces")
        self.input_modules, self.representation = nn.ModuleList([PairwiseDistances()]), SchNet()
        heads = Atomwise(BASIS, 17, "energy"), Atomwise(BASIS, 13, "gap", "avg")
        self.output_modules = nn.ModuleList([*heads, Forces()])
        self.postprocessors = nn.ModuleList([AddOffsets()])

    def forward(self, positions: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        trained = torch.is_grad_enabled()
        with torch.enable_grad():
            at = positions if positions.requires_grad else positions.detach().requires_grad_()
            inputs = self.representation(self.input_modules[0]({"positions": at, **inputs}))
            for module in (*self.output_modules, *self.postprocessors):
                inputs = module(inputs)
        return {key: inputs[key] if trained else inputs[key].detach() for key in self.model_outputs}


def crystals() -> tuple[dict[str, Tensor], Tensor]:
    """Atoms near the sites of lattices, and their energies, gaps and forces by a repulsion of pairs."""
    count = torch.randint(5, 10, (SYSTEMS,))
    sites = torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(3))
    cells = torch.tensor([4.3, 4.7, 6.4]) * (0.9 + 0.2 * torch.rand(SYSTEMS, 3))
    at = torch.cat([sites[torch.randperm(12)[:n]] for n in count]) / torch.tensor([2, 2, 3])
    m = torch.arange(SYSTEMS).repeat_interleave(count)
    r, z = at * cells[m] + 0.2 * torch.randn(len(m), 3), torch.tensor(SPECIES)[torch.randint(6, (len(m),))]
    moves = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3) * cells[m][:, None]
    lines = (r - r[:, None])[:, :, None] + moves[:, None]
    far = lines.norm(dim=-1)
    near = (m == m[:, None])[..., None] & (far > 0) & (far < CUTOFF + SKIN)
    i, j, k = near.nonzero(as_tuple=True)
    inputs = {"atomic_numbers": z, "positions": r, "offsets": moves[i, k], "idx_i": i, "idx_j": j}
    force, far = 0.3 + 0.2 * z.sqrt(), far[near]
    pairs = 3 * force[i] * force[j] * torch.exp(-far)
    energy = scatter_add(scatter_add(pairs / 2, i, len(m)) - 0.6, m, SYSTEMS)
    gap = scatter_add(force, m, SYSTEMS) / count
    pull = scatter_add(-pairs[:, None] * lines[near] / far[:, None], i, len(m))
    return {**inputs, "idx_m": m, "n_atoms": count}, torch.cat([energy, gap, pull.flatten()])


def all_in_a_row(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean squared error of energies, gaps and forces."""
    return F.mse_loss(torch.cat([outputs[key].flatten() for key in ("energy", "gap", "forces")]), target)
