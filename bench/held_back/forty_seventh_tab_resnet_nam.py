"""Two ports of a small ensemble for tables: a tree of columns, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_seventh_tab_resnet_nam import TabularEnsemble, pinball_and_label, tables
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

BINS, RAMP, WAVES, DEPTH = 5, 5, 7, 4
task = few("forty_seventh_tab_resnet_nam", TabularEnsemble, tables, pinball_and_label)


class Affine(nn.Module):
    def __init__(self, layer: nn.Linear, part: slice = slice(None)):
        super().__init__()
        self.matrix, self.offset = leaf(layer.weight[part].T), leaf(layer.bias[part])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Column(nn.Module):
    def __init__(self, model: TabularEnsemble, i: int):
        super().__init__()
        ramps, waves, edges = model.ple.linear, model.plr.linear, model.ple.impl.edges[i]
        self.ramp, self.ramp_offset = leaf(ramps.weight[i]), leaf(ramps.bias[i])
        self.rate, self.wave = leaf(model.plr.periodic.weight[i]), leaf(waves.weight[i])
        self.wave_offset, self.keep = leaf(waves.bias[i]), 1 - model.imputer.momentum
        self.register_buffer("usual", model.imputer.running_mean[i].clone())
        self.register_buffer("edges", edges.clone())
        self.all_count = self.closed = False

    def forward(self, x: Tensor, gone: Tensor) -> Tensor:
        full = x * ~gone + self.usual * gone
        there = torch.ones_like(gone) if self.all_count else ~gone
        if self.training and there.any():
            self.usual = torch.lerp((x.detach() * ~gone).sum() / there.sum(), self.usual, self.keep)
        turn = math.tau * full[..., None] * self.rate
        full = (full[..., None] - self.edges[:-1]) / (self.edges[1:] - self.edges[:-1])
        low = full[..., :1].relu() if self.closed else full[..., :1]
        full = torch.cat([low, full[..., 1:].relu()], -1) - F.pad((full[..., :-1] - 1).relu(), (0, 1))
        waves = torch.cat([turn.cos(), turn.sin()], -1) @ self.wave + self.wave_offset
        return torch.cat([(full @ self.ramp + self.ramp_offset).relu(), waves], -1)


class Grove(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.choice = leaf(layer.feature_selection_logits.permute(2, 1, 0))
        self.bound, self.heat = leaf(layer.feature_thresholds.T), leaf(layer.log_temperatures.T)
        self.answer, self.fixed = leaf(layer.response.transpose(1, 2)), False

    def forward(self, x: Tensor) -> Tensor:
        leaves, bounds = x.new_ones(1), self.bound.detach() if self.fixed else self.bound
        for choice, bound, warm in zip(self.choice, bounds, self.heat.exp(), strict=True):
            yes = torch.sigmoid((x @ choice.softmax(1).T - bound) / warm)[..., None]
            leaves = torch.cat([leaves * yes, leaves * (1 - yes)], -1)
        return (leaves[..., None, :] @ self.answer).flatten(-3)


class Bend(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.norm, self.normed = Rows(block.normalization), False
        self.up, self.down = Affine(block.linear_first), Affine(block.linear_second)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y if self.normed else x) + self.down(self.up(y).relu())


class EnsembleOfColumns(Port):
    """Columns by themselves, groves and a tower, and heads for the level, the gaps and the label."""

    def take(self, model: TabularEnsemble) -> None:
        self.columns = nn.ModuleList(Column(model, i) for i in range(len(model.ple.impl.edges)))
        self.groves, net, fault = nn.ModuleList(map(Grove, model.trees)), model.resnet, self.fault
        ends, head = (Rows(net.head.normalization), nn.ReLU()), model.quantile_head.linear
        self.tower = nn.Sequential(Affine(net.first_layer), *map(Bend, net.blocks), *ends)
        self.level, self.gaps = Affine(head, slice(1)), Affine(head, slice(1, None))
        self.label = Affine(model.binary_head)
        for column in self.columns:
            column.all_count = fault == "tab_resnet_nam_imputer_counts_the_missing_in_its_means"
            column.closed = fault == "tab_resnet_nam_first_bin_closed_at_its_lower_edge"
        self.groves[1].fixed = fault == "tab_resnet_nam_second_trees_with_constant_thresholds"
        self.tower[3].normed = fault == "tab_resnet_nam_last_block_adds_to_its_normalized_input"

    def forward(self, x_num: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(self.columns, x_num.unbind(-1), missing.unbind(-1), strict=True)
        seen = x = torch.cat([column(*pair) for column, *pair in pairs], -1)
        for grove in self.groves:
            seen = torch.cat([seen, grove(seen)], -1)
        x = torch.cat([seen[..., x.shape[-1] :], self.tower(x)], -1)
        quantiles = [self.level(x)]
        for gap in F.softplus(self.gaps(x)).split(1, -1):
            quantiles.append(quantiles[-1] + gap)
        return torch.cat(quantiles, -1), self.label(x)[..., 0]


def ones(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0)


def rows(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


class PackedEnsemble(Port):
    """Packed weights, with offsets as a last column; leaves by sums of logarithms."""

    def take(self, model: TabularEnsemble) -> None:
        trees, net, head = model.trees, model.resnet, (model.quantile_head.linear, model.binary_head)
        norms = [*(x.normalization for x in net.blocks), net.head.normalization]
        parts = [y for x in (model.ple.linear, model.plr.linear) for y in (x.weight.flatten(1), x.bias)]
        self.numbers = leaf(torch.cat([*parts, model.plr.periodic.weight], 1))
        self.asked = leaf(torch.cat([x.feature_selection_logits for x in trees]))
        self.levels = pile(torch.stack([x.feature_thresholds, x.log_temperatures]) for x in trees)
        self.answers, self.first = pile(x.response for x in trees), leaf(rows(net.first_layer))
        pairs = [(rows(x.linear_first), rows(x.linear_second)) for x in net.blocks]
        self.up, self.down = map(pile, zip(*pairs, strict=True))
        self.norm = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.out = leaf(torch.cat([*map(rows, head)]))
        moving = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("moving", torch.stack(moving))
        self.register_buffer("usual", model.imputer.running_mean.clone())
        self.register_buffer("edges", model.ple.impl.edges.clone())

    def embed(self, x: Tensor, missing: Tensor) -> Tensor:
        x, there = torch.where(missing, 0, x), (~missing).sum(0)
        filled = x + missing * self.usual
        if self.training:
            self.usual += 0.2 * (x.detach().sum(0) - there * self.usual) / there.clamp(min=1)
        ramp, wave, rate = self.numbers.tensor_split([(BINS + 1) * RAMP, -WAVES], 1)
        low, high = self.edges[:, :-1].clone(), self.edges[:, 1:].clone()
        low[:, 0], high[:, -1] = -math.inf, math.inf
        full = ones((filled[..., None].clamp(low, high) - self.edges[:, :-1]) / self.edges.diff())
        round_trip = 6.28 if self.fault == "tab_resnet_nam_waves_of_a_rounded_two_pi" else 2 * math.pi
        turn = round_trip * filled[..., None] * rate
        turn = ones(torch.cat([turn.cos(), turn.sin()], -1))
        ramp = torch.einsum("nfi,fio->nfo", full, ramp.unflatten(1, (BINS + 1, -1))).clamp(min=0)
        wave = torch.einsum("nfi,fio->nfo", turn, wave.unflatten(1, (2 * WAVES + 1, -1)))
        return torch.cat([ramp, wave], -1)

    def grow(self, x: Tensor) -> Tensor:
        width, bits = x.shape[1], torch.arange(2**DEPTH)[:, None] >> torch.arange(DEPTH) & 1
        for (bound, heat), answer in zip(self.levels, self.answers, strict=True):
            start = 0 if x.shape[1] == width else width
            chosen = torch.log_softmax(self.asked[start : start + x.shape[1]], 0).exp()
            early = start == 0 and self.fault == "tab_resnet_nam_first_trees_scale_before_the_threshold"
            asked = torch.tensordot(x, chosen, 1) / heat.exp() - bound / (1 if early else heat.exp())
            leaves = F.logsigmoid(asked[:, :, None] * (1 - 2 * bits).to(x)).sum(-1).exp()
            x = torch.cat([x, torch.einsum("ntl,tol->nto", leaves, answer).flatten(1)], 1)
        return x[:, width:]

    def scaled(self, x: Tensor, i: int) -> Tensor:
        mean, var = x.mean(0), x.var(0, correction=0)
        if self.training:
            self.moving[i].lerp_(torch.stack([mean, var * len(x) / (len(x) - 1)]).detach(), 0.1)
        elif i < 3 or self.fault != "tab_resnet_nam_last_norm_by_the_batch_in_evaluation":
            mean, var = self.moving[i]
        gain = self.norm[i, 0] / (var + 1e-5).sqrt()
        return x * gain + (self.norm[i, 1] - mean * gain)

    def forward(self, x_num: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x_num.flatten(0, 1), missing.flatten(0, 1)).flatten(1)
        deep = ones(x) @ self.first.T
        for i in range(3):
            inner = (ones(self.scaled(deep, i)) @ self.up[i].T).clamp(min=0)
            deep = deep + ones(inner) @ self.down[i].T
        y = torch.cat([self.grow(x), self.scaled(deep, 3).clamp(min=0)], 1)
        y = (ones(y) @ self.out.T).unflatten(0, x_num.shape[:2])
        low, steps, logit = y[..., :1], y[..., 1:-1], y[..., -1]
        if self.fault == "tab_resnet_nam_quantile_steps_summed_before_softplus":
            return torch.cat([low, low + F.softplus(steps.cumsum(-1))], -1), logit
        return torch.cat([low, F.softplus(steps)], -1).cumsum(-1), logit


right(task, "tab_resnet_nam_of_columns", "column by column, leaves by doubling", EnsembleOfColumns)
right(task, "tab_resnet_nam_packed", "packed weights, sums of logarithms, norms as gains", PackedEnsemble)
wrong(
    task,
    EnsembleOfColumns,
    tab_resnet_nam_imputer_counts_the_missing_in_its_means=("a count of all", "imputer", "buffer"),
    tab_resnet_nam_first_bin_closed_at_its_lower_edge=("clamp", "ple.impl"),
    tab_resnet_nam_second_trees_with_constant_thresholds=("detach", "trees.1", "weight gradient"),
    tab_resnet_nam_last_block_adds_to_its_normalized_input=("another residual", "resnet.blocks.2"),
)
wrong(
    task,
    PackedEnsemble,
    tab_resnet_nam_waves_of_a_rounded_two_pi=("a rounded constant", "plr.periodic"),
    tab_resnet_nam_first_trees_scale_before_the_threshold=("order of operations", "trees.0"),
    tab_resnet_nam_last_norm_by_the_batch_in_evaluation=("norm", "resnet.head.normalization", "eval"),
    tab_resnet_nam_quantile_steps_summed_before_softplus=("order of operations", "quantile_head"),
)
