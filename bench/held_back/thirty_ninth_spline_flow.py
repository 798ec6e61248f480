"""Two ports of a small neural spline flow: a tree with the samples last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_ninth_spline_flow as made
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_ninth_spline_flow", made.Flow, made.waves, made.negative_log_likelihood)
BINS, BOUND, HIDDEN, SMALL, ROOT = 8, 2.5, 20, 1e-3, math.sqrt(20)
EDGE, BOTH = math.log(math.expm1(1 - SMALL)), ("input gradient", "weight gradient")


def dense(weight: Tensor, offset: Tensor) -> nn.Conv1d:
    layer = nn.Conv1d(weight.shape[1], len(weight), 1)
    layer.weight, layer.bias = leaf(weight[..., None]), leaf(offset)
    return layer


class Conditioner(nn.Module):
    def __init__(self, net: nn.Module, count: int):
        super().__init__()
        first, blocks = net.initial_layer, net.blocks
        self.start, heads = leaf(first.weight[:, :count]), [x.context_layer for x in blocks]
        told = torch.cat([first.weight[:, count:], *(x.weight for x in heads)])
        self.told = dense(told, torch.cat([first.bias, *(x.bias for x in heads)]))
        pairs = ([dense(x.weight, x.bias) for x in block.linear_layers] for block in blocks)
        self.pairs = nn.ModuleList(map(nn.ModuleList, pairs))
        self.last, self.swapped = dense(net.final_layer.weight, net.final_layer.bias), -1

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        start, *gates = self.told(context).split(HIDDEN)
        y = self.start @ x + start
        for i, (one, two) in enumerate(self.pairs):
            both = two(one(y.relu()).relu()), gates[i]
            more, gate = both[::-1] if i == self.swapped else both
            y = y + more * gate.sigmoid()
        return self.last(y)


def likely(x: Tensor, middle: Tensor, power: Tensor) -> Tensor:
    return -((x - middle) / power.exp()).square() / 2 - power - math.log(math.tau) / 2


def knots(free: Tensor, full: bool = False) -> Tensor:
    sizes = SMALL + (1 if full else 1 - SMALL * BINS) * (free / ROOT).softmax(2)
    return F.pad(2 * BOUND * sizes.cumsum(2), (1, 0)) - BOUND


def bend(x: Tensor, said: Tensor, edge: float = EDGE, full: bool = False) -> tuple[Tensor, Tensor]:
    across, up = knots(said[..., :BINS]), knots(said[..., BINS : 2 * BINS], full)
    slopes = F.softplus(F.pad(said[..., 2 * BINS :], (1, 1), value=edge)) + SMALL
    near = x.clamp(-BOUND, BOUND)[..., None]
    at = torch.searchsorted(across[..., 1:-1].detach().contiguous(), near.detach(), right=True)
    (a, b), (c, d), (p, q) = ((z.gather(2, at), z.gather(2, at + 1)) for z in (across, up, slopes))
    t, rise = (near - a) / (b - a), (d - c) / (b - a)
    over, under = (rise - p) * t * t + p * t, rise + (p + q - 2 * rise) * (t - t * t)
    slope = rise * ((2 * (rise - p) * t + p) - over / under * (p + q - 2 * rise) * (1 - 2 * t)) / under
    bent, inside = c + (d - c) * over / under, x.abs() <= BOUND
    return torch.where(inside, bent[..., 0], x), torch.where(inside, slope[..., 0].log(), 0).sum(1)


class Bending(nn.Module):
    def __init__(self, coupling: nn.Module):
        super().__init__()
        self.kept, self.moved = coupling.identity_features.tolist(), coupling.transform_features.tolist()
        self.ask, self.clipped = Conditioner(coupling.transform_net, len(self.kept)), False

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        said = self.ask(x[self.kept], context).unflatten(0, (len(self.moved), -1))
        bound = BOUND if self.clipped and not self.training else math.inf
        bent, log = bend(x[self.moved].T.clamp(-bound, bound), said.permute(2, 0, 1))
        return x.index_copy(0, torch.tensor(self.moved, device=x.device), bent.T), log


def square(norm: nn.Module, mix: nn.Module, columns: bool = False) -> Tensor:
    packed = mix.unconstrained_upper_diag.detach().diag()
    upper, lower = tuple(torch.triu_indices(*packed.shape, 1)), tuple(torch.tril_indices(*packed.shape, -1))
    lower = upper[::-1] if columns else lower
    packed[lower], packed[upper] = mix.lower_entries.detach(), mix.upper_entries.detach()
    return torch.cat([packed, torch.stack([mix.bias, norm.log_scale, norm.shift], 1)], 1)


class Mixing(nn.Module):
    def __init__(self, norm: nn.Module, mix: nn.Module, columns: bool):
        super().__init__()
        packed, rest = square(norm, mix, columns).tensor_split([-3], 1)
        self.low, self.up = leaf(packed.tril(-1)), leaf(packed.triu(1))
        self.offset, self.log, self.move = map(leaf, rest.split(1, 1))
        self.size = leaf(packed.diagonal()[:, None])

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        x, size = x * self.log.exp() + self.move, F.softplus(self.size) + SMALL
        x = size * x + self.up.triu(1) @ x
        return x + self.low.tril(-1) @ x + self.offset, (self.log + size.log()).sum()


class FlowOfColumns(Port):
    def take(self, model: made.Flow) -> None:
        self.parts, fault = nn.ModuleList(), self.fault
        for level in model._transform._transforms:
            for norm, mix, coupling in (step._transforms for step in level._transforms):
                columns = len(self.parts) == 2 and fault == "spline_flow_second_lu_by_columns"
                self.parts.extend([Mixing(norm, mix, columns), Bending(coupling)])
        self.parts[1].ask.swapped = 1 if fault == "spline_flow_second_block_gates_by_features" else -1
        self.parts[5].clipped = fault == "spline_flow_third_tails_clipped_in_evaluation"
        ends = (model._embedding_net[0], model._embedding_net[2], model._distribution._context_encoder)
        self.one, self.two, self.base = (dense(x.weight, x.bias) for x in ends)

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        told = self.two(F.silu(self.one(context.T)))
        x, total, gone = inputs.T, 0, None
        for i, part in enumerate(self.parts):
            gone, x = x.tensor_split(2) if i == 4 else (gone, x)
            x, more = part(x, told)
            total = total + more
        noise = torch.cat([gone, x])
        middle, power = self.base(told).tensor_split(2)
        power = power.detach() if self.fault == "spline_flow_base_spread_detached" else power
        return total + likely(noise, middle, power).sum(0), noise.T


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def by(rows: Tensor, *x: Tensor) -> Tensor:
    return torch.cat([*x, torch.ones_like(x[0][:, :1])], 1) @ rows.T


class PackedFlow(Port):
    def take(self, model: made.Flow) -> None:
        steps = [step._transforms for level in model._transform._transforms for step in level._transforms]
        nets = [step[2].transform_net for step in steps]
        self.mix = nn.ParameterList(leaf(square(*step[:2])) for step in steps)
        ends = ([leaf(sheet(x)) for x in (net.initial_layer, net.final_layer)] for net in nets)
        self.first, self.last = map(nn.ParameterList, zip(*ends, strict=True))
        blocks = [block for net in nets for block in net.blocks]
        self.inner = pile(sheet(layer) for block in blocks for layer in block.linear_layers)
        self.gates = pile(sheet(block.context_layer) for block in blocks)
        ends = (model._embedding_net[0], model._embedding_net[2], model._distribution._context_encoder)
        self.one, self.two, self.base = (leaf(sheet(layer)) for layer in ends)

    def step(self, i: int, x: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        packed, (offset, logs, shift) = self.mix[i][:, :-3], self.mix[i][:, -3:].T
        size = F.softplus(packed.diagonal()) + SMALL
        upper = packed.triu(1) + size.diag()
        matrix = upper + packed.tril(-1) @ upper
        x = x @ (matrix * logs.exp()).T + (matrix @ shift + offset)
        if i == 2 and self.fault == "spline_flow_third_lu_determinant_detached":
            size = size.detach()
        sign = -1 if i == 0 and self.fault == "spline_flow_first_norm_takes_its_scale_off" else 1
        kept, moved = x[:, 1 - i % 2 :: 2], x[:, i % 2 :: 2]
        y = by(self.first[i], kept, told)
        for j in (2 * i, 2 * i + 1):
            more = by(self.inner[2 * j + 1], by(self.inner[2 * j], y.clamp(min=0)).clamp(min=0))
            y = y + more / (1 + torch.exp(-by(self.gates[j], told)))
        full = i == 3 and self.fault == "spline_flow_fourth_heights_overfull"
        padded = i == 1 and self.fault == "spline_flow_second_edges_padded_with_zero"
        said = by(self.last[i], y).unflatten(1, (moved.shape[1], -1))
        moved, log = bend(moved, said, 0.0 if padded else EDGE, full)
        order = torch.arange(i % 2, x.shape[1], 2, device=x.device)
        return x.index_copy(1, order, moved), log + sign * logs.sum() + size.log().sum()

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        told = by(self.two, F.silu(by(self.one, context)))
        x, first = self.step(0, inputs, told)
        x, second = self.step(1, x, told)
        y, third = self.step(2, x[:, 6:], told)
        y, fourth = self.step(3, y, told)
        noise, total = torch.cat([x[:, :6], y], 1), first + second + third + fourth
        middle, power = by(self.base, told).tensor_split(2, 1)
        return total + likely(noise, middle, power).sum(1), noise


ONE, TWO = (f"_transform._transforms.{i}._transforms" for i in (0, 1))
right(task, "spline_flow_of_columns", "a tree, samples last, factors one by one", FlowOfColumns)
right(task, "spline_flow_of_packed_weights", "packed sheets, fused products, quotient rule", PackedFlow)
wrong(
    task,
    FlowOfColumns,
    spline_flow_second_block_gates_by_features=("swapped", f"{ONE}.0._transforms.2.transform_net.blocks.1"),
    spline_flow_second_lu_by_columns=("another order", f"{ONE}.1._transforms.1"),
    spline_flow_third_tails_clipped_in_evaluation=("clip", f"{TWO}.0._transforms.2", "eval"),
    spline_flow_base_spread_detached=("detach", "_distribution", BOTH),
)
wrong(
    task,
    PackedFlow,
    spline_flow_first_norm_takes_its_scale_off=("a sign", f"{ONE}.0._transforms.0"),
    spline_flow_second_edges_padded_with_zero=("padding", f"{ONE}.1._transforms.2"),
    spline_flow_third_lu_determinant_detached=("detach", f"{TWO}.0._transforms.1", BOTH[1]),
    spline_flow_fourth_heights_overfull=("a factor left out", f"{TWO}.1._transforms.2"),
)
