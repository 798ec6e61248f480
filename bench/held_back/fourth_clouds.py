"""A network over point clouds: a learned turn, then edges to the nearest points in feature space."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.tasks import _classes, _task

NEAR = 4


def _nearest(x: Tensor) -> Tensor:
    """[N, P, C] -> the indices [N, P, NEAR] of the nearest points, the point itself among them."""
    return (x[:, :, None] - x[:, None]).square().sum(3).topk(NEAR, largest=False).indices


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.see, self.matrix = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.relu(self.see(x)).amax(2)
        matrix = self.matrix(seen).unflatten(1, (3, 3)) + torch.eye(3, dtype=x.dtype, device=x.device)
        return matrix @ x


class EdgeConv(nn.Module):
    def __init__(self, inside: int, out: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2 * inside, out, 1, bias=False), nn.BatchNorm2d(out)
        self.act = nn.LeakyReLU(0.2)

    def forward(self, x: Tensor) -> Tensor:
        index = _nearest(x.mT).flatten(1)[:, None].expand(-1, x.shape[1], -1)
        near = x.gather(2, index).unflatten(2, (-1, NEAR))
        centers = x[..., None].expand_as(near)
        edges = torch.cat([near - centers, centers], 1)
        return self.act(self.norm(self.conv(edges))).amax(3)


class Cloud(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn, self.edge1, self.edge2 = Turn(), EdgeConv(3, 16), EdgeConv(16, 24)
        self.mix = nn.Sequential(nn.Conv1d(40, 24, 1, bias=False), nn.BatchNorm1d(24), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.edge1(self.turn(x))
        h = self.mix(torch.cat([first, self.edge2(first)], 1))
        return self.head(torch.cat([h.amax(2), h.mean(2)], 1))


class PointsFirst(Port):
    """[N, P, C] throughout; products at the points before the edges take their differences."""

    def take(self, model: Cloud) -> None:
        edges = model.edge1, model.edge2
        self.see = leaf(torch.cat([model.turn.see.weight[..., 0], model.turn.see.bias[:, None]], 1))
        self.turning = model.turn.matrix
        halves = (torch.stack(edge.conv.weight.flatten(1).chunk(2, 1)).mT for edge in edges)
        self.products = nn.ParameterList(map(leaf, halves))
        self.mixing = leaf(model.mix[0].weight[..., 0].T)
        self.norms = nn.ModuleList(Rows(norm) for norm in (edges[0].norm, edges[1].norm, model.mix[1]))
        self.norms[1].shared = NEAR if self.fault == "variance_corrected_by_the_points" else 1
        self.norms[2].own = self.fault == "own_statistics_in_eval_mode"
        self.leave = model.head

    def turned(self, x: Tensor) -> Tensor:
        seen = F.linear(x, self.see[:, :3], self.see[:, 3]).relu().amax(1)
        unit = torch.eye(3, dtype=x.dtype, device=x.device)
        matrix = self.turning(seen).view(-1, 3, 3) + unit
        return x @ (matrix if self.fault == "turned_the_other_way" else matrix.mT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.turned(x.mT)
        index, clouds, maps = _nearest(x), torch.arange(len(x), device=x.device)[:, None, None], []
        for layer, (of_difference, of_center) in enumerate(self.products):
            if layer and self.fault != "one_graph_for_both_layers":
                index = _nearest(x)
            still = x.detach() if layer and self.fault == "centers_do_not_teach" else x
            moved, kept = x @ of_difference, still @ of_center
            difference = moved[clouds, index] - moved[:, :, None]
            if layer and self.fault == "difference_from_the_neighbor":
                difference = -difference
            x = F.leaky_relu(self.norms[layer](difference + kept[:, :, None]), 0.2).amax(2)
            maps.append(x)
        h = F.leaky_relu(self.norms[2](torch.cat(maps, 2) @ self.mixing), 0.2)
        return self.leave(torch.cat([h.amax(1), h.mean(1)], 1))


wrong(
    _task("fourth_cloud", Cloud, lambda: (torch.randn(8, 3, 12), _classes(8, 5))),
    PointsFirst,
    turned_the_other_way=("matrix transposed", "turn"),
    one_graph_for_both_layers=("neighbors in the wrong space", "edge2"),
    difference_from_the_neighbor=("sign in one layer", "edge2"),
    centers_do_not_teach=("detach in one of two terms", "edge2", "input gradient"),
    variance_corrected_by_the_points=("count in the running variance", "edge2.norm", "buffer"),
    own_statistics_in_eval_mode=("norm in train mode", "mix.1", "eval"),
)
