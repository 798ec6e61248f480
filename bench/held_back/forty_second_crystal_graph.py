"""Two ports of a small crystal graph network: a tree over padded boxes, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_crystal_graph import CrystalGraphConvNet, crystals, squares
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_crystal_graph", CrystalGraphConvNet, crystals, squares)


class Level(nn.Module):
    """A batch norm of the last axis over the places that are kept."""

    def __init__(self, norm: nn.BatchNorm1d):
        super().__init__()
        self.rate, self.eps, self.plain = norm.momentum, norm.eps, False
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("width", norm.running_var.clone())
        self.register_buffer("seen", norm.num_batches_tracked.clone())

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        middle, width = self.middle, self.width
        if self.training:
            rows = x[keep].flatten(0, -2)
            middle = rows.mean(0)
            width = (rows - middle).square().mean(0)
            with torch.no_grad():
                kept = width if self.plain else width * len(rows) / (len(rows) - 1)
                self.middle.lerp_(middle, self.rate)
                self.width.lerp_(kept, self.rate)
                self.seen += 1
        return self.gain * (x - middle) / (width + self.eps).sqrt() + self.offset


class Message(nn.Module):
    """What all neighbours tell an atom."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        width = conv.bn2.num_features
        self.shares = nn.ParameterList(map(leaf, conv.fc_full.weight.T.tensor_split([width, 2 * width])))
        self.bias = leaf(conv.fc_full.bias)
        self.level, self.only_real, self.turned = Level(conv.bn1), False, False

    def forward(self, x: Tensor, bond: Tensor, index: Tensor, near: Tensor, real: Tensor) -> Tensor:
        other = x[torch.arange(len(x))[:, None, None], index]
        own = x[:, :, None].expand_as(other)
        if self.turned:
            own, other = other, own
        y = sum(a @ b for a, b in zip((own, other, bond), self.shares, strict=True)) + self.bias
        keep = real[:, :, None] & near if self.only_real else real
        gate, core = self.level(y, keep).chunk(2, -1)
        told = torch.exp(F.logsigmoid(gate)) * torch.logaddexp(core, torch.zeros_like(core))
        return told.masked_fill(~near[..., None], 0).sum(2)


class Layer(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.message, self.level = Message(conv), Level(conv.bn2)

    def forward(self, x: Tensor, bond: Tensor, index: Tensor, near: Tensor, real: Tensor) -> Tensor:
        return F.softplus(self.level(self.message(x, bond, index, near, real), real) + x)


class CrystalsInBoxes(Port):
    """Crystals stay padded boxes; gate and core have their own products, for atom, neighbour and bond."""

    def take(self, model: CrystalGraphConvNet) -> None:
        table, gdf = model.embedding, model.gdf
        self.register_buffer("bells", torch.stack([gdf.filter, gdf.var.expand_as(gdf.filter)]))
        self.names, self.common = leaf(table.weight.T), leaf(table.bias)
        self.layers = nn.ModuleList(map(Layer, model.convs))
        steps = [nn.Softplus()]
        for layer in (model.conv_to_fc, *model.fcs):
            steps += [deepcopy(layer), nn.Softplus()]
        self.read = nn.Sequential(*steps, deepcopy(model.fc_out))
        self.register_buffer("scale", torch.stack([model.normalizer.mean, model.normalizer.std]))
        self.layers[0].level.plain = self.fault == "crystal_graph_first_atom_norm_keeps_plain_variance"
        self.layers[1].message.turned = self.fault == "crystal_graph_second_convolution_puts_neighbour_first"
        real = "crystal_graph_last_edge_norm_leaves_out_padded_neighbours"
        self.layers[2].message.only_real = self.fault == real

    def forward(
        self, atom_types: Tensor, nbr_dist: Tensor, nbr_idx: Tensor, nbr_mask: Tensor, atom_mask: Tensor
    ) -> Tensor:
        power = 1 if self.fault == "crystal_graph_gaussians_divided_by_their_width_unsquared" else 2
        away = nbr_dist[..., None] - self.bells[0]
        x, bond = self.names[atom_types] + self.common, (-away * away / self.bells[1] ** power).exp()
        for layer in self.layers:
            x = layer(x, bond, nbr_idx, nbr_mask, atom_mask)
        share = atom_mask / atom_mask.sum(1, True).to(x)
        return self.scale[0] + self.scale[1] * self.read(torch.einsum("ba,bac->bc", share, x))


def packed(layer: nn.Linear) -> Tensor:
    """The weight transposed, and the bias as its last row."""
    return torch.cat([layer.weight.T, layer.bias[None]])


class StackedCrystals(Port):
    """Stacks by convolution; atoms are multiplied before they are looked up, crystals added by index."""

    def take(self, model: CrystalGraphConvNet) -> None:
        convs, gdf, ends = model.convs, model.gdf, model.normalizer
        self.names, self.full = leaf(packed(model.embedding)), pile(packed(x.fc_full) for x in convs)
        keys = ("weight", "bias", "running_mean", "running_var")
        norms = [[torch.cat([getattr(y, key) for y in (x.bn1, x.bn2)]) for key in keys] for x in convs]
        self.norms = pile(torch.stack(x[:2]) for x in norms)
        self.register_buffer("kept", torch.stack([torch.stack(x[2:]) for x in norms]).detach().clone())
        self.register_buffer("seen", torch.stack([x.bn1.num_batches_tracked for x in convs]))
        self.inner, self.last = leaf(packed(model.conv_to_fc)), leaf(packed(model.fc_out))
        self.deep = pile(map(packed, model.fcs))
        self.register_buffer("fixed", torch.cat([gdf.filter, torch.stack([gdf.var, ends.mean, ends.std])]))

    def norm(self, x: Tensor, i: int, part: slice, eps: float = 1e-5) -> Tensor:
        (gain, offset), kept = self.norms[i, :, part], self.kept[i, :, part]
        mean, var = kept.clone()
        if self.training:
            var, mean = torch.var_mean(x, 0, correction=0)
            with torch.no_grad():
                kept.mul_(0.9).add_(0.1 * torch.stack([mean, var * len(x) / (len(x) - 1)]))
        slope = gain * (var + eps).rsqrt()
        return x * slope + (offset - mean * slope)

    def convolve(self, i: int, x: Tensor, bond: Tensor, index: Tensor, near: Tensor) -> Tensor:
        width, (n, m) = x.shape[1], index.shape
        own, other, edge = self.full[i].tensor_split([width, 2 * width])
        y = (x @ own).repeat_interleave(m, 0) + (x @ other)[index.flatten()] + bond @ edge[:-1] + edge[-1]
        y = self.norm(y, i, slice(2 * width))
        gate, core = 1 / (1 + (-y[:, :width]).exp()), F.softplus(y[:, width:])
        if self.fault == "crystal_graph_second_gate_is_a_constant_to_the_gradient" and i == 1:
            gate = gate.detach()
        told = torch.einsum("nmc,nm->nc", (gate * core).view(n, m, width), near.to(x))
        wide = self.fault == "crystal_graph_last_atom_norm_has_a_larger_epsilon" and i == 2
        return F.softplus(x + self.norm(told, i, slice(2 * width, None), 1e-3 if wide else 1e-5))

    def forward(
        self, atom_types: Tensor, nbr_dist: Tensor, nbr_idx: Tensor, nbr_mask: Tensor, atom_mask: Tensor
    ) -> Tensor:
        centers, (var, mean, std) = self.fixed[:-3], self.fixed[-3:]
        owner, _ = atom_mask.nonzero(as_tuple=True)
        count = atom_mask.sum(1)
        index = nbr_idx[atom_mask] + (count.cumsum(0) - count)[owner, None]
        bond = torch.exp(-(((nbr_dist[atom_mask].reshape(-1, 1) - centers) / var) ** 2))
        x = self.names[atom_types[atom_mask]] + self.names[-1]
        for i in range(len(self.full)):
            x = self.convolve(i, x, bond, index, nbr_mask[atom_mask])
        if self.training:
            self.seen += 1
        if self.fault == "crystal_graph_mean_over_the_padded_atoms_too":
            count = torch.full_like(count, atom_mask.shape[1])
        y = F.softplus(x.new_zeros(len(count), x.shape[1]).index_add(0, owner, x) / count[:, None])
        for w in (self.inner, *self.deep):
            y = F.softplus(y @ w[:-1] + w[-1])
        y = y @ self.last[:-1] + self.last[-1]
        if self.fault == "crystal_graph_mean_not_added_in_evaluation" and not self.training:
            return y * std
        return y * std + mean


right(task, "crystal_graph_of_padded_boxes", "a tree, padded boxes, split weights", CrystalsInBoxes)
right(task, "crystal_graph_of_stacked_weights", "packed stacks, products before look-up", StackedCrystals)
CENTRE, GATE = ("convs.1", "convs.1.fc_full"), ("convs.1", "convs.1.sigmoid")
NORM, SLOPES = ("convs.2.bn1", "convs.2"), ("input gradient", "weight gradient")
wrong(
    task,
    CrystalsInBoxes,
    crystal_graph_gaussians_divided_by_their_width_unsquared=("a square left out", "gdf"),
    crystal_graph_first_atom_norm_keeps_plain_variance=("a biased variance kept", "convs.0.bn2", "buffer"),
    crystal_graph_second_convolution_puts_neighbour_first=("exchanged inputs", CENTRE),
    crystal_graph_last_edge_norm_leaves_out_padded_neighbours=(
        "masked statistics",
        ("convs.2.bn1", "convs.2"),
    ),
)
wrong(
    task,
    StackedCrystals,
    crystal_graph_second_gate_is_a_constant_to_the_gradient=(
        "detach",
        GATE,
        ("input gradient", "weight gradient"),
    ),
    crystal_graph_last_atom_norm_has_a_larger_epsilon=("another epsilon", "convs.2.bn2"),
    crystal_graph_mean_over_the_padded_atoms_too=("a mean over padding", ""),
    crystal_graph_mean_not_added_in_evaluation=(
        "an offset left out in eval",
        "normalizer",
        "eval",
    ),
)
