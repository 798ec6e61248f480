"""A port of a small DimeNet++: a tree over padded molecules."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_seventh_dime_net as dime
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_seventh_dime_net", dime.DimeNetPlusPlus, dime.molecules, dime.property_loss)


def wave(k: int, z: Tensor) -> Tensor:
    if k < 1:
        return (z.cos() if k < 0 else z.sin()) / z
    return (2 * k - 1) / z * wave(k - 1, z) - wave(k - 2, z)


def radial(x: Tensor, table: list) -> Tensor:
    roots = torch.tensor(table, dtype=torch.float64)
    size = torch.stack([math.sqrt(2) / wave(k + 1, row).abs() for k, row in enumerate(roots)])
    z = x[..., None, None] * roots.to(x)
    return size.to(x) * torch.stack([wave(k, z[..., k, :]) for k in range(3)], -2)


def smooth(x: Tensor, p: int = 6) -> Tensor:
    inner = (p + 1) * (p + 2) / 2 - p * (p + 2) * x + p * (p + 1) / 2 * x**2
    return torch.where(x < 1, 1 / x - x ** (p - 1) * inner, 0.0)


def pick(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def drop(x: Tensor, index: Tensor, count: int) -> Tensor:
    return F.one_hot(index, count).to(x).mT @ x


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.kernel = leaf(torch.cat([x.weight for x in layers]).T)
        self.shift = None if layers[0].bias is None else leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.kernel
        return y if self.shift is None else y + self.shift


def lined(*layers: nn.Linear) -> list[nn.Module]:
    return [y for x in layers for y in (Affine(x), nn.SiLU())]


class Exchange(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.by_distance = nn.Sequential(Affine(block.lin_rbf1), Affine(block.lin_rbf2))
        self.by_angle = nn.Sequential(Affine(block.lin_sbf1), Affine(block.lin_sbf2))
        self.pair = Affine(block.lin_ji, block.lin_kj)
        self.narrow, self.widen, self.join = map(Affine, (block.lin_down, block.lin_up, block.lin))
        layers = *block.layers_before_skip, *block.layers_after_skip
        self.refine = nn.ModuleList(nn.Sequential(*lined(x.lin1, x.lin2)) for x in layers)
        self.cut = False

    def forward(self, x: Tensor, rbf: Tensor, sbf: Tensor, kj: Tensor, ji: Tensor, whole: Tensor) -> Tensor:
        own, other = F.silu(self.pair(x)).chunk(2, -1)
        other = pick(F.silu(self.narrow(other * self.by_distance(rbf))), kj) * self.by_angle(sbf) * whole
        h = F.silu(self.widen(drop(other, ji, x.shape[1]))) + own
        h = F.silu(self.join(h + self.refine[0](h))) + (x.detach() if self.cut else x)
        h = h + self.refine[1](h)
        return h + self.refine[2](h)


class Readout(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.gate, self.widen = Affine(block.lin_rbf), nn.Sequential(Affine(block.lin_up))
        self.rest = nn.Sequential(*lined(*block.lins), Affine(block.lin))

    def forward(self, x: Tensor, rbf: Tensor, i: Tensor, there: Tensor, real: Tensor) -> Tensor:
        atoms = self.widen(drop(x * self.gate(rbf) * there, i, real.shape[1]))
        return (self.rest(atoms) * real).sum(1)


class PaddedDimeNet(Port):
    """A tree of modules over padded molecules; what is padded is masked where it is summed."""

    def take(self, model: dime.DimeNetPlusPlus) -> None:
        fault, emb = self.fault, model.emb
        self.pitch, self.types, self.roots = leaf(model.rbf.freq), leaf(emb.emb.weight), list(dime.ZEROS)
        if fault == "dime_net_roots_of_order_two_rounded":
            self.roots[2] = [round(x, 1) for x in self.roots[2]]
        self.near, self.start = Affine(emb.lin_rbf), Affine(emb.lin)
        self.exchanges = nn.ModuleList(map(Exchange, model.interaction_blocks))
        self.exchanges[1].cut = fault == "dime_net_second_skip_without_gradient"
        self.readouts = nn.ModuleList(map(Readout, model.output_blocks))
        if fault == "dime_net_last_output_activates_its_up_projection":
            self.readouts[2].widen.append(nn.SiLU())

    def geometry(self, arrows: Tensor, kj: Tensor, ji: Tensor) -> tuple[Tensor, Tensor]:
        far = torch.linalg.vector_norm(arrows, dim=-1, keepdim=True)
        unit, x = arrows / far, far / dime.CUTOFF
        cos = (pick(unit, kj) * pick(unit, ji)).sum(-1, keepdim=True)
        cos = -cos if self.fault == "dime_net_angle_from_the_arrow_turned_round" else cos
        turned = torch.cat([cos**0, math.sqrt(3) * cos, math.sqrt(5) * (1.5 * cos**2 - 0.5)], -1)
        turned = turned.repeat_interleave(dime.RADIAL, -1) / math.sqrt(4 * math.pi)
        waving = pick(smooth(x) * radial(x[..., 0], self.roots).flatten(-2), kj)
        return smooth(x) * torch.sin(x * self.pitch), waving * turned

    def forward(self, z: Tensor, pos: Tensor, edges: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        real, there, whole = (x[..., None] for x in (z > 0, edges[:, 0] >= 0, idx_kj >= 0))
        (j, i), kj, ji = edges.clamp(min=0).unbind(1), idx_kj.clamp(min=0), idx_ji.clamp(min=0)
        rbf, sbf = self.geometry(torch.where(there, pick(pos, i) - pick(pos, j), 1.0), kj, ji)
        kinds = self.types[z]
        x = F.silu(self.start(torch.cat([pick(kinds, i), pick(kinds, j), F.silu(self.near(rbf))], -1)))
        total = self.readouts[0](x, rbf, i, there, real)
        for exchange, readout in zip(self.exchanges, self.readouts[1:], strict=True):
            x = exchange(x, rbf, sbf, kj, ji, whole)
            total = total + readout(x, rbf, i, there, real)
        return total


SLOPES = ("input gradient", "weight gradient")
right(task, "dime_net_of_padded_molecules", "a tree, masks, cosines and fused pairs", PaddedDimeNet)
wrong(
    task,
    PaddedDimeNet,
    dime_net_angle_from_the_arrow_turned_round=("a sign", ""),
    dime_net_roots_of_order_two_rounded=("rounded constants", "sbf"),
    dime_net_second_skip_without_gradient=("detach", "interaction_blocks.1", SLOPES),
    dime_net_last_output_activates_its_up_projection=("an activation too many", "output_blocks.2"),
)
