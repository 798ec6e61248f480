"""Two ports of PaiNN: layers of packed features, and stacked weights with incidence matrices."""

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourteenth_equivariant import CUTOFF, NeuralNetworkPotential, matched, molecules
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

GRADIENTS = ("input gradient", "weight gradient")
task = few("fourteenth_equivariant", NeuralNetworkPotential, molecules, matched)


class Perceptron(nn.Module):
    """Two products with a SiLU between; the inputs have each a weight, in place of being joined."""

    def __init__(self, net: nn.Sequential, inputs: int = 1):
        super().__init__()
        first, last = net
        self.ins = nn.ParameterList(leaf(part) for part in first.weight.T.chunk(inputs))
        self.inner = leaf(first.bias)
        self.out, self.outer = leaf(last.weight.T), leaf(last.bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden = self.inner + sum(x @ weight for x, weight in zip(inputs, self.ins, strict=True))
        return torch.addmm(self.outer, F.silu(hidden), self.out)


class Edges(nn.Module):
    """Unit vectors, radial bells and the envelope of all pairs."""

    def __init__(self, basis: nn.Module, by_count: bool = False):
        super().__init__()
        self.register_buffer("centers", basis.offsets.clone())
        self.by_count = by_count

    def forward(self, positions: Tensor, shift: Tensor, to: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        arrow = positions.index_select(0, source) + shift - positions.index_select(0, to)
        length = arrow.square().sum(1, keepdim=True).sqrt()
        gap = CUTOFF / len(self.centers) if self.by_count else self.centers[1] - self.centers[0]
        bells = ((length - self.centers) / gap).square().mul(-0.5).exp()
        envelope = torch.cos(pi / 2 * length / CUTOFF).square().masked_fill(length >= CUTOFF, 0)
        return arrow / length, bells, envelope, to, source


class Message(nn.Module):
    """From neighbours, with filters of its own; rows of the state: the scalars, then x, y and z."""

    def __init__(self, block: nn.Module, weight: Tensor, bias: Tensor, receiver: bool = False):
        super().__init__()
        self.said = Perceptron(block.interatomic_context_net)
        self.filter, self.level = leaf(weight.T), leaf(bias)
        self.receiver = receiver

    def forward(self, state: Tensor, edges: tuple[Tensor, ...]) -> Tensor:
        unit, bells, envelope, to, source = edges
        heard = self.said(state[:, 0]).index_select(0, source)
        scalar, along, carried = (heard * torch.addmm(self.level, bells, self.filter) * envelope).chunk(3, 1)
        vectors = state[:, 1:].index_select(0, to if self.receiver else source)
        change = torch.einsum("ef,ex->exf", along, unit) + torch.einsum("ef,exf->exf", carried, vectors)
        return state.index_add(0, to, torch.cat([scalar[:, None], change], 1))


class Layer(nn.Module):
    """A message and the mixing after it."""

    def __init__(self, message: Message, mixing: nn.Module, early: bool = False):
        super().__init__()
        self.message, self.eps, self.early = message, mixing.epsilon, early
        measured, turned = mixing.mu_channel_mix.weight.chunk(2)
        self.measured, self.turned = leaf(measured.T), leaf(turned.T)
        self.thought = Perceptron(mixing.intraatomic_context_net, 2)

    def forward(self, given: Tensor, edges: tuple[Tensor, ...]) -> Tensor:
        state = self.message(given, edges)
        a, b = state[:, 1:] @ self.measured, state[:, 1:] @ self.turned
        scalars = given[:, 0] if self.early else state[:, 0]
        new, gate, share = self.thought(scalars, (a.square().sum(1) + self.eps).sqrt()).chunk(3, 1)
        new = torch.addcmul(new, share, torch.einsum("nxf,nxf->nf", a, b))
        return state + torch.cat([new[:, None], gate[:, None] * b], 1)


class PolarLayers(Port):
    """Layers that have all of one round; the state of an atom is one tensor [4, F]."""

    def take(self, model: NeuralNetworkPotential) -> None:
        net, (atomwise, _) = model.representation, model.output_modules
        self.edges = Edges(net.radial_basis, self.fault == "painn_gaussians_as_wide_as_cutoff_over_count")
        self.elements = leaf(net.embedding.weight)
        filters = (p.chunk(len(net.mixing)) for p in net.filter_net.parameters())
        messages = [Message(*parts) for parts in zip(net.interactions, *filters, strict=True)]
        messages[1].receiver = self.fault == "painn_second_vector_message_reads_the_receiver"
        self.layers = nn.ModuleList(Layer(*both) for both in zip(messages, net.mixing, strict=True))
        self.layers[2].early = self.fault == "painn_last_mixing_context_of_scalars_before_the_message"
        self.head = Perceptron(atomwise.outnet)
        self.register_buffer("mean", model.postprocessors[0].mean.clone())

    def forward(self, kinds: Tensor, r: Tensor, shift: Tensor, to: Tensor, by: Tensor, owner: Tensor) -> dict:
        further = self.fault != "painn_forces_leave_no_graph_for_the_loss"
        with torch.enable_grad():
            r = r if r.requires_grad else r.detach().requires_grad_()
            edges = self.edges(r, shift, to, by)
            state = F.pad(self.elements[kinds][:, None], (0, 0, 0, 3))
            for layer in self.layers:
                state = layer(state, edges)
            shares = self.head(state[:, 0])[:, 0]
            (slope,) = torch.autograd.grad(shares.sum(), r, retain_graph=True, create_graph=further)
            if not self.training:
                shares = shares + self.mean
            energy = shares.new_zeros(int(owner.max()) + 1).scatter_add(0, owner, shares)
        return {"energy": energy, "forces": -slope}


class PolarStacks(Port):
    """Weights of all blocks in stacks; vectors [3, N, F] that point the other way; forces by pairs."""

    def take(self, model: NeuralNetworkPotential) -> None:
        net, (atomwise, _) = model.representation, model.output_modules
        count, width = len(net.mixing), net.width
        talk = [list(block.interatomic_context_net) for block in net.interactions]
        think = [list(block.intraatomic_context_net) for block in net.mixing]
        self.kinds, self.eps = leaf(net.embedding.weight), net.mixing[0].epsilon
        self.filters = leaf(net.filter_net.weight.unflatten(0, (count, 3, width)).mT)
        self.filters_b = leaf(net.filter_net.bias.view(count, 3, 1, width))
        self.talk, self.talk_b = pile(a.weight.T for a, _ in talk), pile(a.bias for a, _ in talk)
        self.think = pile(a.weight.T.unflatten(0, (2, width)) for a, _ in think)
        self.think_b = pile(a.bias for a, _ in think)
        ends = [b for _, b in talk + think]
        self.ends = pile(b.weight.unflatten(0, (3, width)).mT for b in ends)
        self.ends_b = pile(b.bias.view(3, 1, width) for b in ends)
        self.mix = pile(m.mu_channel_mix.weight.unflatten(0, (2, width)).mT for m in net.mixing)
        self.read = nn.ParameterList(leaf(p.mT if p.ndim == 2 else p) for p in atomwise.parameters())
        self.register_buffer("grid", net.radial_basis.offsets.clone())
        self.register_buffer("mean", model.postprocessors[0].mean.clone())

    def fading(self, d: Tensor) -> Tensor:
        if self.fault != "painn_pairs_of_the_skin_count_again":
            d = d.clamp(max=CUTOFF)
        return torch.cos(d * (pi / CUTOFF)) / 2 + 0.5

    def filtered(self, i: int, d: Tensor) -> Tensor:
        bells = torch.exp(-(((d - self.grid) / (self.grid[1] - self.grid[0])) ** 2) / 2)
        if self.fault == "painn_last_filters_fade_without_their_bias" and i == 2:
            return bells * self.fading(d) @ self.filters[i] + self.filters_b[i]
        return (bells @ self.filters[i] + self.filters_b[i]) * self.fading(d)

    def ended(self, i: int, hidden: Tensor) -> Tensor:
        return torch.einsum("nf,kfg->kng", F.silu(hidden), self.ends[i]) + self.ends_b[i]

    def exchanged(self, i: int, q: Tensor, v: Tensor, pairs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        into, out, arrows, d = pairs
        told = out @ self.ended(i, q @ self.talk[i] + self.talk_b[i])
        plain, along, carried = told * self.filtered(i, d)
        return q + into @ plain, v + into @ (along * (arrows / d).T[..., None] + carried * (out @ v))

    def mixed(self, i: int, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.einsum("xnf,kfg->kxng", v, self.mix[i])
        sizes = ((a * a).sum(0) + self.eps) ** 0.5
        hidden = torch.einsum("knf,kfg->ng", torch.stack([q, sizes]), self.think[i]) + self.think_b[i]
        plain, gate, share = self.ended(len(self.mix) + i, hidden)
        if self.fault == "painn_first_mixing_product_over_the_root_of_width" and i == 0:
            share = share / q.shape[1] ** 0.5
        return q + plain + share * (a * b).sum(0), v + gate * b

    def forward(self, kinds: Tensor, r: Tensor, shift: Tensor, to: Tensor, by: Tensor, owner: Tensor) -> dict:
        into, out = (F.one_hot(x, len(kinds)).to(r) for x in (to, by))
        member = F.one_hot(owner).to(r)
        with torch.enable_grad():
            r = r if r.requires_grad else r.detach().requires_grad_()
            arrows = (into - out) @ r - shift
            pairs = into.T, out, arrows, torch.linalg.norm(arrows, dim=1, keepdim=True)
            q, v = self.kinds[kinds], r.new_zeros(3, len(kinds), self.kinds.shape[1])
            for i in range(len(self.mix)):
                q, v = self.mixed(i, *self.exchanged(i, q, v, pairs))
            first, first_b, last, last_b = self.read
            energy = (member.T @ (F.silu(q @ first + first_b) @ last + last_b))[:, 0]
            (pull,) = torch.autograd.grad(energy.sum(), arrows, create_graph=True)
            if not self.training:
                once = self.fault == "painn_mean_energy_once_for_a_molecule_in_evaluation"
                energy = energy + (self.mean if once else self.mean * member.sum(0))
        return {"energy": energy, "forces": (out - into).T @ pull}


right(task, "painn_of_layers_with_packed_features", "fused layers, scalars and vectors in one", PolarLayers)
right(task, "painn_of_stacks_and_incidence_matrices", "stacked weights, forces by pairs", PolarStacks)
wrong(
    task,
    PolarLayers,
    painn_forces_leave_no_graph_for_the_loss=("a first derivative only", "output_modules.1", GRADIENTS),
    painn_second_vector_message_reads_the_receiver=("another index", "representation.interactions.1"),
    painn_gaussians_as_wide_as_cutoff_over_count=("off by one in a width", "representation.radial_basis"),
    painn_last_mixing_context_of_scalars_before_the_message=("a stale value", "representation.mixing.2"),
)
wrong(
    task,
    PolarStacks,
    painn_pairs_of_the_skin_count_again=("a mask left out", "representation.cutoff_fn"),
    painn_last_filters_fade_without_their_bias=("an order", ("representation.filter_net", "representation")),
    painn_first_mixing_product_over_the_root_of_width=("a scale too many", "representation.mixing.0"),
    painn_mean_energy_once_for_a_molecule_in_evaluation=("a factor left out", "postprocessors.0", "eval"),
)
