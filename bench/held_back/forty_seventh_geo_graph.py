"""Two ports of a small PaiNN: a tree over all padded pairs, and stacked sheets over a list of edges."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_seventh_geo_graph import CUTOFF, NeuralNetworkPotential, molecules, properties
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_seventh_geo_graph", NeuralNetworkPotential, molecules, properties)


class Affine(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.kernel, self.shift = leaf(weight.T), None if bias is None else leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel if self.shift is None else x @ self.kernel + self.shift


def cut(layer: nn.Linear, *sizes: int) -> nn.ModuleList:
    biases = [None] * len(sizes) if layer.bias is None else layer.bias.split(sizes)
    return nn.ModuleList(map(Affine, layer.weight.split(sizes), biases))


class Perceptron(nn.Module):
    def __init__(self, net: nn.Sequential, *sizes: int):
        super().__init__()
        self.hidden, self.heads = Affine(net[0].weight, net[0].bias), cut(net[1], *sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.silu(self.hidden(x))
        return [head(x) for head in self.heads]


class Layer(nn.Module):
    def __init__(self, filters: nn.ModuleList, message: nn.Module, update: nn.Module):
        super().__init__()
        self.filters, width = filters, update.mu_channel_mix.in_features
        self.source = Perceptron(message.interatomic_context_net, *[width] * 3)
        self.gates = Perceptron(update.intraatomic_context_net, *[width] * 3)
        self.v, self.u = cut(update.mu_channel_mix, width, width)
        self.eps, self.own, self.outside = update.epsilon, False, False

    def forward(self, s: Tensor, v: Tensor, way: Tensor, waves: Tensor, window: Tensor):
        sent = [x[:, :, None] if self.own else x[:, None] for x in self.source(s)]
        to_s, to_way, to_v = ((f(waves) * window) * x for f, x in zip(self.filters, sent, strict=True))
        s = s + to_s.sum(2)
        v = v + to_way.transpose(2, 3) @ way + torch.einsum("nijf,njfc->nifc", to_v, v)
        inner, outer = (m(v.transpose(2, 3)).transpose(2, 3) for m in (self.v, self.u))
        square = inner.square().sum(-1)
        size = (square + 1e-12).sqrt() + self.eps if self.outside else (square + self.eps).sqrt()
        a_s, a_v, a_sv = self.gates(torch.cat([s, size], 2))
        return s + a_s + a_sv * (inner * outer).sum(-1), v + a_v[..., None] * outer


class Gated(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.gates = Perceptron(block.scalar_net, block.n_sout, block.n_vout)
        self.inner, self.outer = cut(block.mix_vectors, block.n_vout, block.n_vout)
        self.bent, self.still = block.sactivation is not None, False

    def forward(self, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        turned = v.transpose(2, 3)
        size = torch.linalg.vector_norm(self.inner(turned), dim=2)
        s, gate = self.gates(torch.cat([s, size.detach() if self.still else size], 2))
        return s * s.sigmoid() if self.bent else s, (self.outer(turned) * gate[:, :, None]).transpose(2, 3)


class PaddedPaiNN(Port):
    """All pairs of padded atoms, with heads of their own for each part of a filter or a gate."""

    def take(self, model: NeuralNetworkPotential) -> None:
        body, (energy, dipole, _), fault = model.representation, model.output_modules, self.fault
        self.names = leaf(body.embedding.weight)
        self.register_buffer("waves", body.radial_basis.freqs.clone())
        filters = cut(body.filter_net, *[self.names.shape[1]] * 9)
        parts = filters[:3], filters[3:6], filters[6:]
        self.layers = nn.ModuleList(map(Layer, parts, body.interactions, body.mixing))
        self.layers[1].own = fault == "geo_graph_second_interaction_takes_the_context_of_the_receiver"
        self.layers[2].outside = fault == "geo_graph_third_mixing_adds_epsilon_after_the_root"
        self.energy, self.polar = Perceptron(energy.outnet, 1), nn.ModuleList(map(Gated, dipole.outnet))
        self.polar[0].still = fault == "geo_graph_first_dipole_block_takes_the_norms_detached"

    def forward(self, z: Tensor, positions: Tensor) -> dict[str, Tensor]:
        learning, real = torch.is_grad_enabled(), (z > 0)[..., None]
        pair = (real & real.mT & ~torch.eye(z.shape[1]).to(real))[..., None]
        with torch.enable_grad():
            place = positions if positions.requires_grad else positions.detach().requires_grad_()
            gap, s = place[:, None] - place[:, :, None], self.names[z]
            far = (gap.square().sum(-1, True) + ~pair).sqrt()
            waves = (far * self.waves).sin() / (1 if "radial_sines" in self.fault else far)
            window = (far * (math.pi / CUTOFF / 2)).cos().square() * (pair & (far < CUTOFF))
            v = s.new_zeros(*s.shape, 3)
            for layer in self.layers:
                s, v = layer(s, v, gap / far, waves, window)
            energy = (self.energy(s)[0] * real).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), place, create_graph=learning, retain_graph=True)
            for gated in self.polar:
                s, v = gated(s, v)
            dipole = ((s * place + v[:, :, 0]) * real).sum(1)
        found = {"energy": energy, "dipole": dipole, "forces": -slope}
        return found if learning else {name: x.detach() for name, x in found.items()}


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.T, layer.bias[None]])


def two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ a[:-1] + a[-1]) @ b[:-1] + b[-1]


class StackedPaiNN(Port):
    """Sheets stacked over the layers, vectors [3, n, F], and forces from the slopes along the edges."""

    def take(self, model: NeuralNetworkPotential) -> None:
        body, (energy, dipole, _) = model.representation, model.output_modules
        self.names, count = leaf(body.embedding.weight), len(body.mixing)
        self.filters = pile(sheet(body.filter_net).chunk(count, 1))
        nets = [x.interatomic_context_net for x in body.interactions]
        inner = [x.intraatomic_context_net for x in body.mixing]
        self.w = nn.ParameterList(pile(sheet(n[k]) for n in group) for group in (nets, inner) for k in (0, 1))
        self.uv = pile(x.mu_channel_mix.weight.T for x in body.mixing)
        self.ends = nn.ParameterList(leaf(sheet(x)) for x in energy.outnet)
        for block in dipole.outnet:
            self.ends.extend([*(leaf(sheet(x)) for x in block.scalar_net), leaf(block.mix_vectors.weight.T)])
        self.eps = body.mixing[0].epsilon
        self.register_buffer("waves", body.radial_basis.freqs.clone())

    def layer(self, k: int, s: Tensor, v: Tensor, way: Tensor, rows: Tensor, i: Tensor, j: Tensor):
        a, b, c, d = (w[k] for w in self.w)
        one, two_, three = (rows * two(s, a, b)[j]).tensor_split(3, 1)
        if k == 0 and self.fault == "geo_graph_first_interaction_swaps_the_scalar_and_direction_parts":
            one, two_ = two_, one
        s = s.index_add(0, i, one)
        v = v.index_add(1, i, way.T[..., None] * two_ + three * v[:, j])
        left, other = (v @ self.uv[k]).tensor_split(2, 2)
        size = (left.pow(2).sum(0) + self.eps) ** 0.5
        x, y, t = two(torch.cat([s, size], 1), c, d).tensor_split(3, 1)
        factor = left if k == 1 and "second_mixing" in self.fault else other
        return s + x + t * (left * factor).sum(0), v + y * other

    def forward(self, z: Tensor, positions: Tensor) -> dict[str, Tensor]:
        learning, (m, a) = torch.is_grad_enabled(), (z > 0).nonzero(as_tuple=True)
        place, sums = positions[m, a], F.one_hot(m, len(z)).T.to(positions)
        i, j = ((m[:, None] == m) & ~torch.eye(len(m)).to(m > 0)).nonzero(as_tuple=True)
        with torch.enable_grad():
            gap = place[j] - place[i]
            gap = gap if gap.requires_grad else gap.requires_grad_()
            far = gap.norm(dim=1, keepdim=True)
            waves = (far * self.waves).sin() / far
            window = torch.where(far < CUTOFF, (1 + (far * (math.pi / CUTOFF)).cos()) / 2, 0)
            s, v = self.names[z[m, a]], far.new_zeros(3, len(m), self.names.shape[1])
            for k, rows in enumerate(self.filters):
                s, v = self.layer(k, s, v, gap / far, (waves @ rows[:-1] + rows[-1]) * window, i, j)
            energy = sums @ two(s, *self.ends[:2])[:, 0]
            graph = learning and self.fault != "geo_graph_forces_are_found_without_a_graph"
            (slope,) = torch.autograd.grad(energy.sum(), gap, create_graph=graph, retain_graph=True)
            for first, last, both in (self.ends[2:5], self.ends[5:]):
                left, other = (v @ both).tensor_split(2, 2)
                x, width = two(torch.cat([s, left.norm(dim=0)], 1), first, last), other.shape[2]
                s, v = x[:, :-width], x[:, -width:] * other
                s, charge = F.silu(s), s
            if self.fault == "geo_graph_charges_made_neutral_in_evaluation" and not self.training:
                charge = charge - sums.T @ (sums @ charge / sums.sum(1, True))
            dipole = sums @ (charge * place + v[..., 0].T)
            pull = torch.zeros_like(place).index_add(0, i, slope).index_add(0, j, -slope)
        forces = torch.zeros_like(positions).index_put((m, a), pull)
        found = {"energy": energy, "dipole": dipole, "forces": forces}
        return found if learning else {name: x.detach() for name, x in found.items()}


SLOPES, BODY = ("input gradient", "weight gradient"), "representation."
right(task, "geo_graph_of_padded_pairs", "a tree, dense pairs, split filters and gates", PaddedPaiNN)
right(task, "geo_graph_of_stacked_sheets", "packed stacks, forces from edges", StackedPaiNN)
wrong(
    task,
    PaddedPaiNN,
    geo_graph_radial_sines_not_divided_by_the_distance=("a factor left out", BODY + "radial_basis"),
    geo_graph_second_interaction_takes_the_context_of_the_receiver=("wrong index", BODY + "interactions.1"),
    geo_graph_third_mixing_adds_epsilon_after_the_root=("epsilon elsewhere", BODY + "mixing.2"),
    geo_graph_first_dipole_block_takes_the_norms_detached=("detach", "output_modules.1.outnet.0", SLOPES),
)
wrong(
    task,
    StackedPaiNN,
    geo_graph_first_interaction_swaps_the_scalar_and_direction_parts=("split", BODY + "interactions.0"),
    geo_graph_second_mixing_multiplies_v_by_itself=("a wrong operand", BODY + "mixing.1"),
    geo_graph_forces_are_found_without_a_graph=("no graph", "output_modules.2", SLOPES),
    geo_graph_charges_made_neutral_in_evaluation=("a correction in eval", "output_modules.1", "eval"),
)
