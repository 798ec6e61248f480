"""A port of a small DimeNet++: one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_seventh_dime_net as dime
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back.thirty_seventh_dime_net import radial, smooth, task


def solid(*layers: nn.Linear) -> Tensor:
    return torch.stack([torch.cat([x.weight.T, x.bias[None]]) for x in layers])


class StackedDimeNet(Port):
    """Stacks of weights, and one list of edges for all molecules."""

    def take(self, model: dime.DimeNetPlusPlus) -> None:
        inner, ends, emb = model.interaction_blocks, model.output_blocks, model.emb
        deep = [(*x.layers_before_skip, *x.layers_after_skip) for x in inner]
        deep = [solid(*(z for y in x for z in (y.lin1, y.lin2))) for x in deep]
        self.square = pile(
            torch.cat([solid(x.lin_ji, x.lin_kj, x.lin), y]) for x, y in zip(inner, deep, strict=True)
        )
        for name in ("rbf1", "rbf2", "sbf1", "sbf2", "down", "up"):
            setattr(self, name, pile(getattr(x, f"lin_{name}").weight for x in inner))
        for name in ("rbf", "up", ""):
            setattr(self, f"end_{name}", pile(getattr(x, f"lin_{name}".strip("_")).weight for x in ends))
        self.deep = pile(solid(*x.lins) for x in ends)
        self.freq, self.table = leaf(model.rbf.freq), leaf(emb.emb.weight)
        self.near = leaf(torch.cat([emb.lin_rbf.weight, emb.lin_rbf.bias[:, None]], 1))
        self.start, self.shift = leaf(emb.lin.weight.unflatten(1, (3, dime.HIDDEN))), leaf(emb.lin.bias)

    def active(self, x: Tensor, w: Tensor) -> Tensor:
        return F.silu(torch.addmm(w[-1], x, w[:-1]))

    def mix(self, b: int, x: Tensor, rbf: Tensor, sbf: Tensor, kj: Tensor, ji: Tensor) -> Tensor:
        w = self.square[b]
        y = self.active(x, w[1]) * (rbf @ (self.rbf2[b] @ self.rbf1[b]).T)
        y = F.silu(y @ self.down[b].T)[kj] * (sbf @ (self.sbf2[b] @ self.sbf1[b]).T)
        y = torch.zeros_like(x[:, : y.shape[1]]).index_add(0, ji, y)
        if self.fault == "dime_net_first_interaction_takes_the_mean_of_triplets" and b == 0:
            y = y / ji.bincount(minlength=len(x)).clamp(min=1)[:, None]
        h = self.active(x, w[0]) + F.silu(y @ self.up[b].T)
        for k in (3, 5, 7):
            h = h + self.active(self.active(h, w[k]), w[k + 1])
            if k == 3:
                h = self.active(h, w[2]) + x
        return h

    def tell(self, b: int, x: Tensor, rbf: Tensor, i: Tensor, count: int) -> Tensor:
        x = x.new_zeros(count, dime.HIDDEN).index_add(0, i, x * (rbf @ self.end_rbf[b].T)) @ self.end_up[b].T
        return self.active(self.active(x, self.deep[b, 0]), self.deep[b, 1]) @ self.end_[b].T

    def forward(self, z: Tensor, pos: Tensor, edges: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        (n, atoms), rows = z.shape, torch.arange(len(z))[:, None]
        there, whole = edges[:, 0] >= 0, idx_kj >= 0
        j, i = ((edges[:, k] + atoms * rows)[there] for k in (0, 1))
        rank = there.flatten().cumsum(0) - 1
        kj, ji = (rank[(x + there.shape[1] * rows)[whole]] for x in (idx_kj, idx_ji))
        arrows = pos.flatten(0, 1)[i] - pos.flatten(0, 1)[j]
        square = arrows.square().sum(1)
        x, freq = square.sqrt() / dime.CUTOFF, self.freq
        freq = freq.detach() if self.fault == "dime_net_frequencies_for_a_constant" else freq
        p = 5 if self.fault == "dime_net_radial_envelope_one_power_lower" else 6
        cos = (arrows[kj] * arrows[ji]).sum(1) * (square[kj] * square[ji]).rsqrt()
        turned = (
            torch.stack([cos**0, cos, (3 * cos * cos - 1) / 2], 1)
            * (x.new_tensor([1, 3, 5]) / (4 * math.pi)).sqrt()
        )
        waving = radial(x, dime.ZEROS) * smooth(x)[:, None, None]
        sbf = torch.einsum("tlr,tl->tlr", waving[kj], turned).flatten(1)
        rbf = torch.sin(torch.outer(x, freq)) * smooth(x, p)[:, None]
        kinds, near = self.table[z.flatten()], F.silu(rbf @ self.near[:, :-1].T + self.near[:, -1])
        three, total = torch.stack([kinds[i], kinds[j], near]), 0
        x = F.silu(torch.einsum("sec,osc->eo", three, self.start) + self.shift)
        for b in range(len(self.deep)):
            x = self.mix(b - 1, x, rbf, sbf, kj, ji) if b else x
            total = total + self.tell(b, x, rbf, i, n * atoms)
        real = (z > 0)[..., None]
        total = (total.unflatten(0, (n, atoms)) * real).sum(1)
        if self.fault == "dime_net_properties_averaged_over_atoms_in_evaluation" and not self.training:
            total = total / real.sum(1)
        return total


right(task, "dime_net_of_stacked_weights", "stacks, one list of edges, merged bases", StackedDimeNet)
wrong(
    task,
    StackedDimeNet,
    dime_net_radial_envelope_one_power_lower=("an exponent off by one", "rbf.envelope"),
    dime_net_frequencies_for_a_constant=("detach", "rbf", "weight gradient"),
    dime_net_first_interaction_takes_the_mean_of_triplets=("a mean for a sum", "interaction_blocks.0"),
    dime_net_properties_averaged_over_atoms_in_evaluation=("a mean in eval", "", "eval"),
)
