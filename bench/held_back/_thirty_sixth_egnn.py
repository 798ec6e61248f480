"""A small E(n) equivariant graph network: charged bodies with velocities, in padded graphs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAPHS, BODIES, TYPES, EDGES, HIDDEN, LAYERS = 4, 7, 4, 2, 22, 3
FEATURES = TYPES + 1


def unsorted_segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    result = data.new_zeros(num_segments, data.size(1))
    return result.index_add(0, segment_ids, data)


def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    count = unsorted_segment_sum(torch.ones_like(data), segment_ids, num_segments)
    return unsorted_segment_sum(data, segment_ids, num_segments) / count.clamp(min=1)


class E_GCL_vel(nn.Module):  # noqa: N801
    """A layer: messages along the edges, new coordinates by velocity and by messages, new features."""

    def __init__(self, input_nf: int, hidden_nf: int, edges_in_d: int, nodes_att_dim: int):
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * input_nf + 1 + edges_in_d, hidden_nf),
            nn.SiLU(),
            nn.Linear(hidden_nf, hidden_nf),
            nn.SiLU(),
        )
        self.node_mlp = nn.Sequential(
            nn.Linear(hidden_nf + input_nf + nodes_att_dim, hidden_nf),
            nn.SiLU(),
            nn.Linear(hidden_nf, input_nf),
        )
        layer = nn.Linear(hidden_nf, 1, bias=False)
        nn.init.xavier_uniform_(layer.weight, gain=2.0)
        self.coord_mlp = nn.Sequential(nn.Linear(hidden_nf, hidden_nf), nn.SiLU(), layer, nn.Tanh())
        self.coords_range = nn.Parameter(2 + torch.rand(1))
        self.coord_mlp_vel = nn.Sequential(nn.Linear(input_nf, hidden_nf), nn.SiLU(), nn.Linear(hidden_nf, 1))
        self.att_mlp = nn.Sequential(nn.Linear(hidden_nf, 1), nn.Sigmoid())

    def edge_model(self, source: Tensor, target: Tensor, radial: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.edge_mlp(torch.cat([source, target, radial, edge_attr], dim=1))
        return out * self.att_mlp(out)

    def node_model(self, x: Tensor, row: Tensor, edge_attr: Tensor, node_attr: Tensor) -> Tensor:
        agg = unsorted_segment_sum(edge_attr, row, num_segments=x.size(0))
        return x + self.node_mlp(torch.cat([x, agg, node_attr], dim=1))

    def coord_model(self, coord: Tensor, row: Tensor, coord_diff: Tensor, edge_feat: Tensor) -> Tensor:
        trans = coord_diff * self.coord_mlp(edge_feat) * self.coords_range
        return coord + unsorted_segment_mean(trans, row, num_segments=coord.size(0))

    def coord2radial(self, row: Tensor, col: Tensor, coord: Tensor) -> tuple[Tensor, Tensor]:
        coord_diff = coord[row] - coord[col]
        radial = torch.sum(coord_diff**2, 1).unsqueeze(1)
        norm = torch.sqrt(radial + 1e-8) + 1
        return coord_diff / norm, radial

    def forward(
        self, h: Tensor, edge_index: Tensor, coord: Tensor, vel: Tensor, edge_attr: Tensor, node_attr: Tensor
    ) -> tuple[Tensor, Tensor]:
        row, col = edge_index
        coord_diff, radial = self.coord2radial(row, col, coord)
        edge_feat = self.edge_model(h[row], h[col], radial, edge_attr)
        coord = self.coord_model(coord, row, coord_diff, edge_feat)
        coord = coord + self.coord_mlp_vel(h) * vel
        return self.node_model(h, row, edge_feat, node_attr), coord


class EGNN(nn.Module):
    """Features, places and velocities of bodies, attributes of pairs, a mask -> new places, energies."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(FEATURES, HIDDEN)
        for i in range(LAYERS):
            self.add_module(f"gcl_{i}", E_GCL_vel(HIDDEN, HIDDEN, EDGES, FEATURES))
        self.node_dec = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.graph_dec = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))

    def forward(
        self, h0: Tensor, x: Tensor, vel: Tensor, edge_attr: Tensor, node_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        n, bodies = node_mask.shape
        pairs = node_mask[:, :, None] & node_mask[:, None] & ~torch.eye(bodies).bool().to(node_mask)
        graph, source, target = pairs.nonzero(as_tuple=True)
        edges = torch.stack([graph * bodies + source, graph * bodies + target])
        attr = edge_attr[graph, source, target]
        h0, coord, vel = h0.flatten(0, 1), x.flatten(0, 1), vel.flatten(0, 1)
        h = self.embedding(h0)
        for i in range(LAYERS):
            h, coord = self._modules[f"gcl_{i}"](h, edges, coord, vel, attr, h0)
        kept = node_mask.flatten()[:, None].to(h)
        h = (self.node_dec(h) * kept).view(n, bodies, HIDDEN).sum(1)
        return (coord * kept).view(n, bodies, 3), self.graph_dec(h).squeeze(1)


def bodies() -> tuple[dict[str, Tensor], Tensor]:
    """Charged bodies that attract and repel; the target has their next places, and the energy at each."""
    mask = torch.arange(BODIES) < torch.randint(3, BODIES + 1, (GRAPHS, 1))
    kept = mask[:, :, None].float()
    kind = torch.randint(TYPES, (GRAPHS, BODIES))
    charge = (kind - 1.5)[:, :, None] / 1.5 * kept
    x, vel = torch.randn(2, GRAPHS, BODIES, 3) * kept
    diff = x[:, :, None] - x[:, None]
    product = charge[:, :, None] * charge[:, None]
    bond = (torch.rand(GRAPHS, BODIES, BODIES, 1) < 0.3) * kept[:, :, None] * kept[:, None]
    strength = product / (1 + diff.square().sum(-1, True))
    force = (strength * diff).sum(2)
    h0 = torch.cat([F.one_hot(kind, TYPES), vel.norm(dim=-1, keepdim=True)], -1) * kept
    energy = strength.sum((1, 2), True)[..., 0].expand(-1, BODIES, -1) / 2
    inputs = {"h0": h0, "x": x, "vel": vel, "edge_attr": torch.cat([product, bond], -1), "node_mask": mask}
    return inputs, torch.cat([(x + 0.5 * vel + force) * kept, energy], -1)


def places_and_energy(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The squared error of the places, and some of that of the energy."""
    places, energy = outputs
    return F.mse_loss(places, target[..., :3]) + 0.2 * F.mse_loss(energy, target[:, 0, 3])
