"""A small DimeNet++: messages along the edges of molecules, by distances and by angles of triplets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATOMS, MOLECULES, TYPES, CUTOFF, OUT = 6, 4, 7, 4.0, 2
HIDDEN, INNER, BASIS, WIDE, SPHERICAL, RADIAL, BLOCKS = 24, 20, 9, 28, 3, 5, 2


def spherical_bessel(order: int, z: Tensor) -> Tensor:
    sin, cos = z.sin() / z, z.cos() / z
    first, second = sin / z - cos, (3 / z**2 - 1) * sin - 3 / z * cos
    return (sin, first, second, (15 / z**3 - 6 / z) * sin - (15 / z**2 - 1) * cos)[order]


# the first zeros of each order
ZEROS = [
    [3.141592653590, 6.283185307180, 9.424777960769, 12.566370614359, 15.707963267949],
    [4.493409457909, 7.725251836938, 10.904121659429, 14.066193912831, 17.220755271931],
    [5.763459196895, 9.095011330476, 12.322940970567, 15.514603010887, 18.689036355363],
]


def scatter(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, x.shape[1]).index_add(0, index, x)


class Envelope(nn.Module):
    def __init__(self, exponent: int = 5):
        super().__init__()
        self.p = p = exponent + 1
        self.a, self.b, self.c = -(p + 1) * (p + 2) / 2, p * (p + 2), -p * (p + 1) / 2

    def forward(self, x: Tensor) -> Tensor:
        x_pow_p0 = x.pow(self.p - 1)
        y = 1.0 / x + self.a * x_pow_p0 + self.b * x_pow_p0 * x + self.c * x_pow_p0 * x**2
        return y * (x < 1.0).to(x.dtype)


class BesselBasisLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.envelope = Envelope()
        self.freq = nn.Parameter(math.pi * torch.arange(1, RADIAL + 1) + 0.1 * torch.randn(RADIAL))

    def forward(self, dist: Tensor) -> Tensor:
        dist = dist.unsqueeze(-1) / CUTOFF
        return self.envelope(dist) * (self.freq * dist).sin()


class SphericalBasisLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.envelope = Envelope()

    def forward(self, dist: Tensor, angle: Tensor, idx_kj: Tensor) -> Tensor:
        dist, cos, rows = (dist / CUTOFF)[:, None], angle.cos(), []
        for order, row in enumerate(ZEROS):
            zeros = torch.tensor(row, dtype=torch.float64)
            norm = (math.sqrt(2) / spherical_bessel(order + 1, zeros).abs()).to(dist)
            rows.append(norm * spherical_bessel(order, zeros.to(dist) * dist))
        rbf = self.envelope(dist)[..., None] * torch.stack(rows, 1)
        legendre = torch.stack([torch.ones_like(cos), cos, (3 * cos**2 - 1) / 2], 1)
        scale = cos.new_tensor([math.sqrt((2 * k + 1) / (4 * math.pi)) for k in range(SPHERICAL)])
        return (rbf[idx_kj] * (scale * legendre)[:, :, None]).flatten(1)


class EmbeddingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(TYPES, HIDDEN)
        self.lin_rbf, self.lin = nn.Linear(RADIAL, HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, rbf: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x, rbf = self.emb(x), F.silu(self.lin_rbf(rbf))
        return F.silu(self.lin(torch.cat([x[i], x[j], rbf], dim=-1)))


class ResidualLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.lin2(F.silu(self.lin1(x))))


class InteractionPPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_rbf1 = nn.Linear(RADIAL, BASIS, bias=False)
        self.lin_rbf2 = nn.Linear(BASIS, HIDDEN, bias=False)
        self.lin_sbf1 = nn.Linear(SPHERICAL * RADIAL, BASIS, bias=False)
        self.lin_sbf2 = nn.Linear(BASIS, INNER, bias=False)
        self.lin_kj, self.lin_ji = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.lin_down = nn.Linear(HIDDEN, INNER, bias=False)
        self.lin_up = nn.Linear(INNER, HIDDEN, bias=False)
        self.layers_before_skip = nn.ModuleList([ResidualLayer()])
        self.lin = nn.Linear(HIDDEN, HIDDEN)
        self.layers_after_skip = nn.ModuleList([ResidualLayer(), ResidualLayer()])

    def forward(self, x: Tensor, rbf: Tensor, sbf: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        x_ji, x_kj = F.silu(self.lin_ji(x)), F.silu(self.lin_kj(x))
        x_kj = x_kj * self.lin_rbf2(self.lin_rbf1(rbf))
        x_kj = F.silu(self.lin_down(x_kj))
        x_kj = x_kj[idx_kj] * self.lin_sbf2(self.lin_sbf1(sbf))
        x_kj = F.silu(self.lin_up(scatter(x_kj, idx_ji, len(x))))
        h = x_ji + x_kj
        for layer in self.layers_before_skip:
            h = layer(h)
        h = F.silu(self.lin(h)) + x
        for layer in self.layers_after_skip:
            h = layer(h)
        return h


class OutputPPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_rbf = nn.Linear(RADIAL, HIDDEN, bias=False)
        self.lin_up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.lins = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.lin = nn.Linear(WIDE, OUT, bias=False)

    def forward(self, x: Tensor, rbf: Tensor, i: Tensor, num_nodes: int) -> Tensor:
        x = self.lin_up(scatter(self.lin_rbf(rbf) * x, i, num_nodes))
        for lin in self.lins:
            x = F.silu(lin(x))
        return self.lin(x)


class DimeNetPlusPlus(nn.Module):
    """Padded molecules (z is 0, indices are -1 at the end) -> a few properties of each."""

    def __init__(self):
        super().__init__()
        self.rbf, self.sbf, self.emb = BesselBasisLayer(), SphericalBasisLayer(), EmbeddingBlock()
        self.output_blocks = nn.ModuleList(OutputPPBlock() for _ in range(BLOCKS + 1))
        self.interaction_blocks = nn.ModuleList(InteractionPPBlock() for _ in range(BLOCKS))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.8 * layer.in_features**-0.5)
        for block in self.output_blocks:
            nn.init.normal_(block.lin.weight, std=0.04)

    def forward(self, z: Tensor, pos: Tensor, edges: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        real, there, whole = z > 0, edges[:, 0] >= 0, idx_kj >= 0
        first_atom, first_edge = ((x.sum(1).cumsum(0) - x.sum(1))[:, None] for x in (real, there))
        size, batch = len(z), real.nonzero()[:, 0]
        j, i = ((edges[:, k] + first_atom)[there] for k in (0, 1))
        idx_kj, idx_ji = ((x + first_edge)[whole] for x in (idx_kj, idx_ji))
        z, pos = z[real], pos[real]
        dist = (pos[i] - pos[j]).pow(2).sum(dim=-1).sqrt()
        pos_jk, pos_ij = (pos[i] - pos[j])[idx_kj], (pos[i] - pos[j])[idx_ji]
        a = (pos_ij * pos_jk).sum(dim=-1)
        b = torch.linalg.cross(pos_ij, pos_jk).norm(dim=1)
        rbf, sbf = self.rbf(dist), self.sbf(dist, torch.atan2(b, a), idx_kj)
        x = self.emb(z, rbf, i, j)
        p = self.output_blocks[0](x, rbf, i, len(z))
        for interaction_block, output_block in zip(
            self.interaction_blocks, self.output_blocks[1:], strict=True
        ):
            x = interaction_block(x, rbf, sbf, idx_kj, idx_ji)
            p = p + output_block(x, rbf, i, len(z))
        return scatter(p, batch, size)


def molecules() -> tuple[dict[str, Tensor], Tensor]:
    """Bent chains of four to six atoms, and what a pair potential and the types say of them."""
    z, pos = torch.zeros(MOLECULES, ATOMS, dtype=torch.long), torch.zeros(MOLECULES, ATOMS, 3)
    edges = torch.full((MOLECULES, 2, 30), -1)
    turns, target = torch.full((2, MOLECULES, 120), -1), torch.zeros(MOLECULES, OUT)
    for n in range(MOLECULES):
        count = int(torch.randint(4, ATOMS + 1, ()))
        z[n, :count] = torch.randint(1, TYPES, (count,))
        pos[n, :count] = torch.arange(count)[:, None] * torch.tensor([1.2, 0, 0]) + 0.4 * torch.randn(
            count, 3
        )
        far = torch.cdist(pos[n, :count], pos[n, :count])
        pairs = ((far < CUTOFF) & (far > 0)).nonzero().tolist()
        near = range(len(pairs))
        found = [
            (f, e) for e in near for f in near if pairs[f][1] == pairs[e][0] and pairs[f][0] != pairs[e][1]
        ]
        edges[n, :, : len(pairs)], turns[:, n, : len(found)] = torch.tensor(pairs).T, torch.tensor(found).T
        target[n] = torch.stack([(-far).exp().sum() / 5, z[n].float().mean() / 3])
    return {"z": z, "pos": pos, "edges": edges, "idx_kj": turns[0], "idx_ji": turns[1]}, target


def property_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(outputs, target) / 4
