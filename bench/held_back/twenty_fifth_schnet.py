"""Two ports of a small SchNet: a tree of columns for atoms and pairs, and padded neighbour lists."""

import math

import torch
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fifth_schnet import NeuralNetworkPotential, all_in_a_row, crystals

task = few("twenty_fifth_schnet", NeuralNetworkPotential, crystals, all_in_a_row)
NAMES = ("energy", "gap", "forces")


def bent(x: Tensor) -> Tensor:
    """The logarithm of the mean of one and the exponential."""
    return torch.logaddexp(x, torch.zeros_like(x)) - math.log(2)


def marks(index: Tensor, count: int, like: Tensor) -> Tensor:
    """A row for each entry of the index, with a one in the column that it names."""
    return (index[:, None] == torch.arange(count, device=index.device)).to(like.dtype)


class Map(nn.Module):
    """A product from the left, of columns; layers given together are one above the other."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.weight = leaf(torch.cat([x.weight for x in layers]))
        self.bias = leaf(torch.cat([x.bias for x in layers])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.weight, x)


class Filters(nn.Module):
    """Lengths -> the filters of all interactions: one first layer, a batch of second ones, an envelope."""

    def __init__(self, net: nn.Module):
        super().__init__()
        networks, bumps = [x.filter_network for x in net.interactions], net.radial_basis
        self.middle, self.width = leaf(bumps.offsets[:, None]), leaf(bumps.widths[:, None])
        self.first, self.twice = Map(*(x[0] for x in networks)), None
        self.weight = pile(x[1].weight for x in networks)
        self.bias = pile(x[1].bias[:, None] for x in networks)
        self.register_buffer("end", net.cutoff_fn.cutoff.clone())

    def forward(self, length: Tensor) -> tuple[Tensor, ...]:
        bumps = torch.exp(-((length - self.middle) / self.width).square() / 2)
        hidden = bent(self.first(bumps)).unflatten(0, (len(self.bias), -1))
        made = torch.baddbmm(self.bias, self.weight, hidden)
        fade = torch.cos(math.pi / 2 * (length / self.end).clamp(max=1)).square()
        return tuple(fade * (bent(x) if i == self.twice else x) for i, x in enumerate(made))


class Exchange(nn.Module):
    """What an atom gives is gathered, filtered, summed by a matrix, and added to what it was."""

    def __init__(self, interaction: nn.Module):
        super().__init__()
        self.give = leaf(interaction.in2f.weight)
        self.one, self.two = map(Map, interaction.f2out)

    def forward(self, x: Tensor, filters: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return x + self.two(bent(self.one((filters * (self.give @ x).index_select(1, source)) @ target)))


class Heads(nn.Module):
    """Both properties of each atom from one hidden layer, whose upper part is the energy's."""

    def __init__(self, heads: list[nn.Module]):
        super().__init__()
        self.hidden, self.border = Map(*(x.outnet[0] for x in heads)), heads[0].outnet[0].out_features
        self.rows = leaf(torch.cat([x.outnet[1].weight for x in heads], 1).T)
        self.shift = leaf(torch.cat([x.outnet[1].bias for x in heads]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.rows * bent(self.hidden(x))
        return y[: self.border].sum(0) + self.shift[0], y[self.border :].sum(0) + self.shift[1]


class SchNetInColumns(Port):
    """Filters of all layers at once, exchanges and heads; the forces are collected from the pairs."""

    def take(self, model: NeuralNetworkPotential) -> None:
        net, after = model.representation, model.postprocessors[0]
        self.table, self.filters = leaf(net.embedding.weight.T), Filters(net)
        self.exchanges = nn.ModuleList(map(Exchange, net.interactions))
        self.heads = Heads(model.output_modules[:2])
        self.register_buffer("known", torch.cat([after.mean, after.atomref]))
        self.filters.twice = 1 if self.fault == "schnet_second_filter_bent_at_its_end" else None
        self.softening = 1e-3 if self.fault == "schnet_distances_softened_by_an_epsilon" else 0

    def forward(self, positions: Tensor, offsets: Tensor, **rest: Tensor) -> dict[str, Tensor]:
        outer, z, source = torch.is_grad_enabled(), rest["atomic_numbers"], rest["idx_j"]
        with torch.enable_grad():
            line = (positions[source] - positions[rest["idx_i"]] + offsets).T.contiguous().requires_grad_()
            member = marks(rest["idx_m"], len(rest["n_atoms"]), line)
            ends = [marks(rest[key], len(positions), line) for key in ("idx_i", "idx_j")]
            length, x = (line.square().sum(0, keepdim=True) + self.softening).sqrt(), self.table[:, z]
            for exchange, filters in zip(self.exchanges, self.filters(length), strict=True):
                x = exchange(x, filters, source, ends[0])
            energy, gap = self.heads(x)
            graph = self.fault != "schnet_forces_keep_no_graph"
            (slope,) = torch.autograd.grad(energy.sum(), line, retain_graph=True, create_graph=graph)
            forces = (slope @ (ends[0] - ends[1])).T
            energy, gap = (energy + self.known[0]) @ member, gap @ member / member.sum(0)
            if self.fault != "schnet_atom_references_only_in_training" or self.training:
                energy = energy + self.known[1:][z] @ member
        return {key: x if outer else x.detach() for key, x in zip(NAMES, (energy, gap, forces), strict=True)}


def packed(layer: nn.Linear) -> Tensor:
    """One matrix for rows, whose last row is the bias."""
    return torch.cat([layer.weight.T, layer.bias[None]])


def twice(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Two layers; the softplus between them has an odd half and an even one."""
    half = (x @ one[:-1] + one[-1]) / 2
    return (half + half.cosh().log()) @ two[:-1] + two[-1]


def listed(centre: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The numbers of the pairs of each atom in a row of its own, and which of them there are."""
    order, many = centre.argsort(stable=True), centre.bincount(minlength=count)
    rank = torch.arange(len(order), device=order.device) - (many.cumsum(0) - many)[centre[order]]
    slot = rank.new_full((count, int(many.max())), -1)
    slot[centre[order], rank] = order
    return slot.clamp(min=0), slot >= 0


class ListedSchNet(Port):
    """Stacks of packed weights; the pairs stand in padded lists [N, K], molecules are split off."""

    def take(self, model: NeuralNetworkPotential) -> None:
        net, heads, after = model.representation, model.output_modules[:2], model.postprocessors[0]
        self.kinds, self.basis = leaf(net.embedding.weight), pile([*net.radial_basis.parameters()][::-1])
        self.give = pile(x.in2f.weight.T for x in net.interactions)
        self.sieve, self.out = (
            nn.ParameterList(pile(packed(getattr(x, name)[k]) for x in net.interactions) for k in (0, 1))
            for name in ("filter_network", "f2out")
        )
        self.tops = nn.ParameterList(leaf(packed(y)) for x in heads for y in x.outnet)
        self.register_buffer("end", net.cutoff_fn.cutoff.clone())
        self.register_buffer("known", torch.cat([after.mean, after.atomref]))

    def exchange(self, i: int, x: Tensor, bumps: Tensor, fade: Tensor, source: Tensor) -> Tensor:
        sieve = twice(bumps, self.sieve[0][i], self.sieve[1][i])
        if self.fault == "schnet_last_interaction_averages_its_neighbours" and i == 2:
            fade = fade / (fade > 0).sum(1, keepdim=True)
        y = torch.einsum("nk,nkf,nkf->nf", fade, sieve, (x @ self.give[i])[source])
        return x + twice(y, self.out[0][i], self.out[1][i])

    def forward(self, positions: Tensor, offsets: Tensor, **rest: Tensor) -> dict[str, Tensor]:
        outer, sizes = torch.is_grad_enabled(), rest["n_atoms"].tolist()
        (slot, there), kind = listed(rest["idx_i"], len(positions)), rest["atomic_numbers"]
        with torch.enable_grad():
            at = positions if positions.requires_grad else positions.detach().requires_grad_()
            source = rest["idx_j"][slot]
            far = torch.where(there[..., None], at[source] + offsets[slot] - at[:, None], 1).norm(dim=2)
            middle, width = self.basis
            width = width.detach() if self.fault == "schnet_widths_taken_for_constants" else width
            bumps = torch.exp(-(far[..., None] - middle).square() / (2 * width * width))
            x, fade = self.kinds[kind], there * (1 + torch.cos(far * (math.pi / self.end))) / 2
            if self.fault != "schnet_cutoff_rises_again_behind_its_end":
                fade = fade * (far < self.end)
            for i in range(len(self.give)):
                x = self.exchange(i, x, bumps, fade, source)
            own, gap = (twice(x, *self.tops[k : k + 2])[:, 0].split(sizes) for k in (0, 2))
            forces = -torch.autograd.grad(torch.cat(own).sum(), at, create_graph=True)[0]
            kept = (self.known[0] + self.known[1:])[kind].split(sizes)
            energy = torch.stack([(y + z).sum() for y, z in zip(own, kept, strict=True)])
            largest = self.fault == "schnet_mean_divides_by_the_largest_molecule"
            gap = torch.stack([y.sum() / (max(sizes) if largest else len(y)) for y in gap])
        return {key: x if outer else x.detach() for key, x in zip(NAMES, (energy, gap, forces), strict=True)}


SLOPES, FILTER = ("input gradient", "weight gradient"), "representation.interactions.1.filter_network.1"
right(task, "schnet_in_columns_with_forces_by_pair", "a tree, fused filters, columns", SchNetInColumns, True)
right(task, "schnet_of_padded_neighbour_lists", "packed stacks, padded lists", ListedSchNet, True)
wrong(
    task,
    SchNetInColumns,
    schnet_distances_softened_by_an_epsilon=("an epsilon added", "representation"),
    schnet_second_filter_bent_at_its_end=("an activation too many", FILTER),
    schnet_forces_keep_no_graph=("a gradient without a graph", "output_modules.2", SLOPES),
    schnet_atom_references_only_in_training=("left out in eval", "postprocessors.0", "eval"),
)
wrong(
    task,
    ListedSchNet,
    schnet_widths_taken_for_constants=("detach", "representation.radial_basis", "weight gradient"),
    schnet_cutoff_rises_again_behind_its_end=("a mask left out", "representation.cutoff_fn"),
    schnet_last_interaction_averages_its_neighbours=("a mean for a sum", "representation.interactions.2"),
    schnet_mean_divides_by_the_largest_molecule=("a wrong count", "output_modules.1"),
)
