"""Two ports of a small EGNN: a tree over all pairs, and flat code over rings of neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_sixth_egnn import EGNN, HIDDEN, LAYERS, bodies, places_and_energy

task = few("thirty_sixth_egnn", EGNN, bodies, places_and_energy)


def layers_of(model: EGNN) -> list[nn.Module]:
    return [model.get_submodule(f"gcl_{i}") for i in range(LAYERS)]


class Affine(nn.Module):
    """x @ weight + bias, of some columns of a linear layer."""

    def __init__(self, layer: nn.Linear, first: int = 0, last: int | None = None, biased: bool = True):
        super().__init__()
        self.weight = leaf(layer.weight[:, first:last].T)
        self.bias = leaf(layer.bias) if biased and layer.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def two(block: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(Affine(block[0]), nn.SiLU(), Affine(block[2]))


class Messages(nn.Module):
    """[N, A, A, H]: what each body hears of each other one, gated."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        first = layer.edge_mlp[0]
        self.here = Affine(first, 0, HIDDEN)
        self.there = Affine(first, HIDDEN, 2 * HIDDEN, biased=False)
        self.apart = Affine(first, 2 * HIDDEN, 2 * HIDDEN + 1, biased=False)
        self.about = Affine(first, 2 * HIDDEN + 1, biased=False)
        self.second, self.gate, self.mute = Affine(layer.edge_mlp[2]), Affine(layer.att_mlp[0]), False

    def forward(self, h: Tensor, square: Tensor, about: Tensor, pairs: Tensor) -> Tensor:
        y = self.here(h).unsqueeze(2) + self.there(h).unsqueeze(1) + self.apart(square) + self.about(about)
        y = F.silu(self.second(F.silu(y)))
        gate = 1 / (1 + (-self.gate(y)).exp())
        return y * (gate.detach() if self.mute else gate) * pairs


class Motion(nn.Module):
    """The step of each body: by the pull of the others, and along its velocity."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.pull, self.drift, self.reach = (
            two(layer.coord_mlp),
            two(layer.coord_mlp_vel),
            leaf(layer.coords_range),
        )
        self.over_all, self.soft = False, 1e-8

    def forward(
        self, h: Tensor, told: Tensor, gap: Tensor, square: Tensor, vel: Tensor, pairs: Tensor
    ) -> Tensor:
        pull = pairs * self.pull(told).tanh() / (1 + (square + self.soft).sqrt())
        count = pairs.shape[2] - 1 if self.over_all else pairs.sum(2).clamp(min=1)
        return self.reach * (pull * gap).sum(2) / count + self.drift(h) * vel


class Round(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.messages, self.motion = Messages(layer), Motion(layer)
        first = layer.node_mlp[0]
        self.keep, self.hear = Affine(first, 0, HIDDEN), Affine(first, HIDDEN, 2 * HIDDEN, biased=False)
        self.recall, self.out = Affine(first, 2 * HIDDEN, biased=False), Affine(layer.node_mlp[2])

    def forward(self, h: Tensor, x: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        start, vel, about, pairs = given
        gap = x.unsqueeze(2) - x.unsqueeze(1)
        square = gap.square().sum(-1, keepdim=True)
        told = self.messages(h, square, about, pairs)
        x = x + self.motion(h, told, gap, square, vel, pairs)
        return h + self.out(F.silu(self.keep(h) + self.hear(told.sum(2)) + self.recall(start))), x


class EgnnOfAllPairs(Port):
    """Rounds over a dense square of pairs, with the first weights split by what they read."""

    def take(self, model: EGNN) -> None:
        self.enter, self.rounds = Affine(model.embedding), nn.ModuleList(map(Round, layers_of(model)))
        self.each, self.whole = two(model.node_dec), two(model.graph_dec)
        self.rounds[0].messages.mute = self.fault == "egnn_first_attention_gate_detached"
        self.rounds[2].motion.over_all = self.fault == "egnn_last_coordinates_averaged_over_padding_too"
        if self.fault == "egnn_second_distance_softened_too_much":
            self.rounds[1].motion.soft = 1e-2

    def forward(self, h0: Tensor, x: Tensor, vel: Tensor, edge_attr: Tensor, node_mask: Tensor) -> tuple:
        mask = node_mask.unsqueeze(-1).to(x)
        others = 1 - torch.eye(mask.shape[1]).to(x).unsqueeze(-1)
        pairs = mask.unsqueeze(2) * mask.unsqueeze(1) * others
        h = self.enter(h0)
        for each in self.rounds:
            h, x = each(h, x, (h0, vel, edge_attr, pairs))
        total = (self.each(h) * mask).sum(1)
        if self.fault == "egnn_readout_averages_bodies_in_evaluation" and not self.training:
            total = total / mask.sum(1)
        return x * mask, self.whole(total)[:, 0]


def sheet(layer: nn.Linear) -> Tensor:
    """A row for each input, and one for the bias."""
    return torch.cat([layer.weight.T, layer.bias[None]])


def apply(sheet: Tensor, *parts: Tensor) -> Tensor:
    return torch.cat([*parts, torch.ones_like(parts[0][..., :1])], -1) @ sheet


class FlatEgnn(Port):
    """Stacked sheets; each body has its neighbours in a ring, one to six places on."""

    def take(self, model: EGNN) -> None:
        layers, dec = layers_of(model), (model.node_dec, model.graph_dec)
        heard = [sheet(x.edge_mlp[0]) for x in layers]
        if self.fault == "egnn_second_edge_weight_swaps_the_two_bodies":
            one, other, rest = heard[1].split([HIDDEN, HIDDEN, len(heard[1]) - 2 * HIDDEN])
            heard[1] = torch.cat([other, one, rest])
        self.heard, self.renew = pile(heard), pile(sheet(x.node_mlp[0]) for x in layers)
        inner = [(x.edge_mlp[2], x.coord_mlp[0], x.coord_mlp_vel[0], x.node_mlp[2]) for x in layers]
        self.inner = pile(torch.stack([sheet(x) for x in each]) for each in inner)
        self.tips = pile(torch.cat([sheet(x.att_mlp[0]), sheet(x.coord_mlp_vel[2])], 1) for x in layers)
        self.pull = pile(x.coord_mlp[2].weight[0] for x in layers)
        self.reach = leaf(torch.cat([x.coords_range for x in layers]))
        self.enter, self.final = leaf(sheet(model.embedding)), leaf(sheet(dec[1][2]))
        self.ends = pile(sheet(x) for x in (dec[0][0], dec[0][2], dec[1][0]))

    def turn(self, i: int, h: Tensor, x: Tensor, fixed: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        h0, vel, about, near, there = fixed
        (edge, coord, drift, node), gate, speed = self.inner[i], self.tips[i, :, :1], self.tips[i, :, 1:]
        toward = x[:, near] - x[:, :, None]
        square = torch.linalg.vecdot(toward, toward)[..., None]
        told = apply(
            self.heard[i], h[:, :, None].expand(-1, -1, near.shape[1], -1), h[:, near], square, about
        )
        told = F.silu(apply(edge, F.silu(told)))
        told = told * apply(gate, told).sigmoid()
        size = torch.tanh(F.silu(apply(coord, told)) @ self.pull[i])[..., None]
        count = there.sum(2).clamp(min=1)
        reach = self.reach[i]
        if self.fault == "egnn_last_coords_range_held_constant" and i == LAYERS - 1:
            reach = reach.detach()
        x = x - torch.where(there, reach * size * toward / ((square + 1e-8).sqrt() + 1), 0).sum(2) / count
        new = F.silu(apply(self.renew[i], h, torch.where(there, told, 0).sum(2), h0))
        new = apply(node, new) + h
        read = new if self.fault == "egnn_first_velocity_gate_reads_the_new_features" and i == 0 else h
        return new, torch.addcmul(x, apply(speed, F.silu(apply(drift, read))), vel)

    def forward(self, h0: Tensor, x: Tensor, vel: Tensor, edge_attr: Tensor, node_mask: Tensor) -> tuple:
        here = torch.arange(node_mask.shape[1], device=x.device)[:, None]
        near = (here + here.T[:, 1:]) % len(here)
        there = (node_mask[:, near] & node_mask[:, :, None])[..., None]
        h, fixed = apply(self.enter, h0), (h0, vel, edge_attr[:, here, near], near, there)
        for i in range(LAYERS):
            h, x = self.turn(i, h, x, fixed)
        kept = node_mask[..., None]
        total = torch.where(kept, apply(self.ends[1], F.silu(apply(self.ends[0], h))), 0).sum(1)
        act = F.relu if self.fault == "egnn_graph_decoder_has_relu_for_silu" else F.silu
        return torch.where(kept, x, 0), apply(self.final, act(apply(self.ends[2], total)))[:, 0]


SLOPES = ("input gradient", "weight gradient")
right(task, "egnn_of_all_pairs_with_split_weights", "a tree, dense pairs, split weights", EgnnOfAllPairs)
right(task, "egnn_flat_over_rings_of_neighbours", "stacked sheets, gathered neighbours", FlatEgnn)
wrong(
    task,
    EgnnOfAllPairs,
    egnn_first_attention_gate_detached=("detach", ("gcl_0", "gcl_0.att_mlp"), SLOPES),
    egnn_second_distance_softened_too_much=("another epsilon", "gcl_1"),
    egnn_last_coordinates_averaged_over_padding_too=("another count in a mean", "gcl_2"),
    egnn_readout_averages_bodies_in_evaluation=("a mean for a sum in eval", "", "eval"),
)
wrong(
    task,
    FlatEgnn,
    egnn_first_velocity_gate_reads_the_new_features=("order of updates", "gcl_0"),
    egnn_second_edge_weight_swaps_the_two_bodies=("columns swapped", ("gcl_1.edge_mlp.0", "gcl_1")),
    egnn_graph_decoder_has_relu_for_silu=("another activation", "graph_dec.1"),
    egnn_last_coords_range_held_constant=("detach", "gcl_2", "weight gradient"),
)
