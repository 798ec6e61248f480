"""A port of a graph network from one list of edges to padded squares, the layers' weights stacked."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighth_graphs import HEADS, LAYERS, WIDTH, Graphs, apart, graphs
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

listed = few("eighth_graphs", Graphs, graphs, apart)


class PaddedSquares(Port):
    """Graphs [G, T, C] with filler and bonds [G, T, T, C], the node that an edge ends in first."""

    def take(self, model: Graphs) -> None:
        at, mlps = [layer.attention for layer in model.layers], [layer.mlp for layer in model.layers]
        norms, virtuals, out = [x.norm for x in model.layers], [v.mlp for v in model.virtuals], model.readout
        self.w = nn.ParameterDict(
            {
                "lift": leaf(model.lift.weight.T),
                "lift_b": leaf(model.lift.bias),
                "tie": leaf(model.bond[0].weight.T),
                "tie_b": leaf(model.bond[0].bias),
                "first": leaf(model.start[0]),
                "vskq": pile(torch.cat([a.v.weight, a.skip.weight, a.k.weight, a.q.weight]).T for a in at),
                "vsq_b": pile(torch.stack([a.v.bias, a.skip.bias, a.q.bias]) for a in at),
                "ties": pile(a.bond.weight.T for a in at),
                "mixing": pile(a.beta.weight.unflatten(1, (3, WIDTH))[0] for a in at),
                "mixing_b": leaf(torch.cat([a.beta.bias for a in at])),
                "norm": pile(torch.stack([n.part, n.weight, n.bias]) for n in norms),
                "up": pile(m[0].weight.T for m in mlps),
                "up_b": pile(m[0].bias for m in mlps),
                "down": pile(m[2].weight.T for m in mlps),
                "down_b": pile(m[2].bias for m in mlps),
                "read": pile(torch.stack([v[0].weight.T, v[3].weight.T]) for v in virtuals),
                "read_b": pile(v[3].bias for v in virtuals),
                "batch": pile(torch.stack([v[1].weight, v[1].bias]) for v in virtuals),
                "jump": leaf(model.jump.score.weight[0]),
                "gate": leaf(out.gate.weight[0]),
                "value": leaf(out.value.weight.T),
                "value_b": leaf(out.value.bias),
                "head": leaf(out.head[0].weight.unflatten(1, (2, WIDTH)).permute(1, 2, 0)),
                "head_b": leaf(out.head[0].bias),
                "last": leaf(out.head[2].weight.T),
                "last_b": leaf(out.head[2].bias),
            }
        )
        self.register_buffer("kept", torch.stack([v[1].running_mean for v in virtuals]))
        self.register_buffer("kept_spread", torch.stack([v[1].running_var for v in virtuals]))

    def attend(self, i: int, h: Tensor, bonds: Tensor, ends: Tensor) -> Tensor:
        v, skip, k, q = (h @ self.w["vskq"][i]).chunk(4, 2)
        shifts, bond = self.w["vsq_b"][i], (bonds @ self.w["ties"][i]).unflatten(3, (HEADS, -1))
        v, k, q = (x.unflatten(2, (HEADS, -1)) for x in (v + shifts[0], k, q + shifts[2]))
        skip = skip + shifts[1]
        scores = torch.einsum("gqhd,gkhd->ghqk", q, k) + torch.einsum("gqhd,gqkhd->ghqk", q, bond)
        scores = scores / (WIDTH / HEADS) ** 0.5
        scores = scores.masked_fill(~ends[:, None], torch.finfo(scores.dtype).min)
        axis = 2 if self.fault == "middle_shares_among_the_edges_that_leave" and i == 1 else 3
        shares = scores.softmax(axis) * ends[:, None]
        mixed = torch.einsum("ghqk,gkhd->gqhd", shares, v)
        if not (self.fault == "bonds_missing_in_the_first_values" and i == 0):
            mixed = mixed + torch.einsum("ghqk,gqkhd->gqhd", shares, bond)
        mixed, (a, b, c) = mixed.flatten(2), self.w["mixing"][i]
        beta = torch.sigmoid(mixed @ (a + c) + skip @ (b - c) + self.w["mixing_b"][i])[..., None]
        return torch.lerp(mixed, skip, beta)

    def normed(self, i: int, h: Tensor, real: Tensor) -> Tensor:
        part, gain, offset = self.w["norm"][i]
        count = real.sum(1, keepdim=True)
        mean = (h * real).sum(1, keepdim=True) / count
        less = h - part * mean
        about = h - mean if self.fault == "last_spread_about_the_whole_mean" and i == 2 else less
        spread = (about * about * real).sum(1, keepdim=True) / count
        return less * (spread + 1e-5).rsqrt() * gain + offset

    def read(self, i: int, virtual: Tensor, h: Tensor, real: Tensor) -> Tensor:
        if self.fault == "filler_read_by_the_second_virtual_node" and i == 1:
            real = torch.ones_like(real)
        x = (virtual + torch.einsum("gtc,gto->gc", h, real.to(h))) @ self.w["read"][i, 0]
        mean, spread = self.kept[i], self.kept_spread[i]
        if self.training:
            mean, spread = x.mean(0), x.var(0, correction=0)
            rate = 0.01 if self.fault == "averages_of_the_first_virtual_node_kept_slowly" and i == 0 else 0.1
            with torch.no_grad():
                self.kept[i] += rate * (mean - self.kept[i])
                self.kept_spread[i] += rate * (x.var(0) - self.kept_spread[i])
        gain, offset = self.w["batch"][i]
        x = F.silu((x - mean) / (spread + 1e-5).sqrt() * gain + offset)
        return virtual + x @ self.w["read"][i, 1] + self.w["read_b"][i]

    def forward(self, nodes: Tensor, edges: Tensor, bonds: Tensor, owner: Tensor) -> Tensor:
        w, sizes = self.w, torch.bincount(owner)
        spot = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner]
        graphs, width = len(sizes), int(sizes.max())
        real = (torch.arange(width, device=owner.device) < sizes[:, None])[..., None]
        at = owner[edges[1]], spot[edges[1]], spot[edges[0]]
        ends = torch.zeros(graphs, width, width, dtype=torch.bool, device=owner.device)
        ends = ends.index_put(at, torch.ones_like(at[0], dtype=torch.bool))
        bonds = bonds.new_zeros(graphs, width, width, 3).index_put(at, bonds)
        h = nodes.new_zeros(graphs, width, 5).index_put((owner, spot), nodes) @ w["lift"] + w["lift_b"]
        bonds, virtual, states = F.silu(bonds @ w["tie"] + w["tie_b"]), w["first"].repeat(graphs, 1), []
        for i in range(LAYERS):
            h = h + virtual[:, None]
            h = h + F.silu(self.normed(i, self.attend(i, h, bonds, ends), real))
            h = h + F.silu(h @ w["up"][i] + w["up_b"][i]) @ w["down"][i] + w["down_b"][i]
            states.append(h)
            if i + 1 < LAYERS:
                virtual = self.read(i, virtual, h, real)
        stacked = torch.stack(states)
        shares = (stacked @ w["jump"]).softmax(0)
        if self.fault == "shares_of_the_layers_learn_nothing":
            shares = shares.detach()
        h = torch.einsum("lgt,lgtc->gtc", shares, stacked)
        gates = (h @ w["gate"]).masked_fill(~real[..., 0], torch.finfo(h.dtype).min).softmax(1)
        weighed = torch.einsum("gt,gtc->gc", gates, h @ w["value"] + w["value_b"])
        mean = (h * real).sum(1) / sizes[:, None]
        return F.silu(weighed @ w["head"][0] + mean @ w["head"][1] + w["head_b"]) @ w["last"] + w["last_b"]


right(listed, "graphs_in_padded_squares", "one list of edges as padded squares", PaddedSquares)
wrong(
    listed,
    PaddedSquares,
    middle_shares_among_the_edges_that_leave=("softmax over the wrong axis", "layers.1.attention"),
    bonds_missing_in_the_first_values=("a term missing", "layers.0.attention"),
    last_spread_about_the_whole_mean=("variance about another mean", "layers.2.norm"),
    filler_read_by_the_second_virtual_node=("padding counted in a sum", "virtuals.1"),
    shares_of_the_layers_learn_nothing=("a detach too many", "jump", ("input gradient", "weight gradient")),
    averages_of_the_first_virtual_node_kept_slowly=("wrong momentum", "virtuals.0.mlp.1", "buffer"),
)
