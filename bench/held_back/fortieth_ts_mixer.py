"""Two ports of a small TSMixerx: a tree with the time last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fortieth_ts_mixer import HORIZON, TARGETS, TSMixer, errors, seasons
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_ts_mixer", TSMixer, seasons, errors)


class Channels(nn.Module):
    """A product over the features of [N, C, T]."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.matrix, self.offset = leaf(layer.weight.T), leaf(layer.bias[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("co,nct->not", self.matrix, x) + self.offset


class Whole(Rows):
    """A batch norm of all values as one channel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., None])[..., 0]


def turned(norm: nn.LayerNorm) -> nn.LayerNorm:
    """The same layer norm for [C, T]."""
    other = nn.LayerNorm(norm.weight.T.shape)
    other.weight, other.bias = leaf(norm.weight.T), leaf(norm.bias.T)
    return other


class Widening(nn.Module):
    """Two products with a bend between, beside a third; a norm ahead or at the end."""

    def __init__(self, mixing: nn.Module, ahead: nn.Module | None = None):
        super().__init__()
        self.ahead, self.up, self.down = ahead or nn.Identity(), Channels(mixing.fc1), Channels(mixing.fc2)
        self.side = Channels(mixing.projection) if isinstance(mixing.projection, nn.Linear) else nn.Identity()
        self.end = nn.Identity() if ahead else turned(mixing.norm_after)
        self.side_after = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.ahead(x)
        return self.end(self.down(F.gelu(self.up(y))) + self.side(y if self.side_after else x))


class Stage(nn.Module):
    """What is known of the series joins once, for all times."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        static, over, last = layer.feature_mixing_static, layer.time_mixing, layer.feature_mixing
        self.join = Widening(static, Whole(static.norm_before))
        self.join.ahead.shared = 1 / HORIZON
        self.norm, self.over, self.bend = Whole(over.norm_before), Channels(over.fc1), F.gelu
        self.last = Widening(last, Whole(last.norm_before))

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        x = torch.cat((x, self.join(known).expand(-1, -1, x.shape[2])), 1)
        return self.last(self.bend(self.over(self.norm(x).mT)).mT + x)


class MixerWithTimeLast(Port):
    """Stages of [N, C, T]; the instance norm is a gain and a shift."""

    def take(self, model: TSMixer) -> None:
        self.gain, self.shift = leaf(model.rin.affine_weight[:, None]), leaf(model.rin.affine_bias[:, None])
        self.eps, self.onward, self.read = model.rin.eps, Channels(model.fc_hist), Channels(model.fc_out)
        self.before, self.later = Widening(model.feature_mixing_hist), Widening(model.feature_mixing_future)
        self.stages = nn.ModuleList(map(Stage, model.conditional_mixer))
        self.stages[0].last.side_after = (
            self.fault == "ts_mixer_first_feature_mixing_projects_its_normed_input"
        )
        if self.fault == "ts_mixer_second_static_norm_counts_each_series_once":
            self.stages[1].join.ahead.shared = 1
        if self.fault == "ts_mixer_last_time_mixing_bends_by_sigmoid":
            self.stages[2].bend = lambda x: x * torch.sigmoid(1.702 * x)

    def forward(self, x: Tensor, x_future: Tensor, x_static: Tensor) -> Tensor:
        own, more = x.mT.split([TARGETS, x.shape[2] - TARGETS], 1)
        fewer = int(self.fault == "ts_mixer_instance_norm_divides_by_one_time_fewer")
        spread, center = torch.var_mean(own.detach(), 2, correction=fewer, keepdim=True)
        spread = (spread + self.eps).sqrt()
        gain = self.gain / spread
        own = own * gain + (self.shift - center * gain)
        x = self.before(self.onward(torch.cat((own, more), 1).mT).mT)
        x = torch.cat((x, self.later(x_future.mT)), 1)
        for stage in self.stages:
            x = stage(x, x_static[..., None])
        back = spread / (self.gain + self.eps**2)
        return (self.read(x) * back + (center - self.shift * back)).mT


def rows(*layers: nn.Linear) -> Tensor:
    """A row for each output, its offset last; of several layers one below the other."""
    return leaf(torch.cat([torch.cat([x.weight, x.bias[:, None]], 1) for x in layers]))


def product(x: Tensor, matrix: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) @ matrix.T


def bend(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x * math.sqrt(0.5))) / 2


class PackedMixer(Port):
    """Packs of rows; the numbers of all batch norms are in one weight and one buffer."""

    def take(self, model: TSMixer) -> None:
        self.eps, layers = model.rin.eps, model.conditional_mixer
        self.rin = pile([model.rin.affine_weight, model.rin.affine_bias])
        ends = (model.feature_mixing_hist, model.feature_mixing_future)
        self.tables = nn.ParameterList(pile([x.norm_after.weight, x.norm_after.bias]) for x in ends)
        mixings = [*ends, *(y for x in layers for y in (x.feature_mixing_static, x.feature_mixing))]
        sides = [[x.projection] if isinstance(x.projection, nn.Linear) else [] for x in mixings]
        self.up = nn.ParameterList(rows(x.fc1, *side) for x, side in zip(mixings, sides, strict=True))
        self.down = nn.ParameterList(rows(x.fc2) for x in mixings)
        self.hist, self.out = rows(model.fc_hist), rows(model.fc_out)
        self.over = pile(rows(x.time_mixing.fc1) for x in layers)
        parts = ((x.feature_mixing_static, x.time_mixing, x.feature_mixing) for x in layers)
        norms = [x.norm_before for each in parts for x in each]
        self.affine = pile(torch.cat([x.weight, x.bias]) for x in norms)
        known = [torch.cat([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("known", torch.stack(known))
        self.register_buffer("seen", torch.stack([x.num_batches_tracked for x in norms]))

    def whole(self, i: int, x: Tensor) -> Tensor:
        center, spread = self.known[i].clone()
        own = self.fault == "ts_mixer_last_feature_norm_by_its_batch_in_evaluation" and i == 8
        if self.training or own:
            spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
        if self.training:
            unbiased = spread.detach() * x.numel() / (x.numel() - 1)
            self.known[i] = self.known[i] * 0.9 + 0.1 * torch.stack([center.detach(), unbiased])
            self.seen[i] += 1
        return (x - center) / (spread + 1e-5).sqrt() * self.affine[i, 0] + self.affine[i, 1]

    def mix(self, k: int, x: Tensor, normed: Tensor) -> Tensor:
        inner = self.down[k].shape[1] - 1
        side = product(x, self.up[k][inner:]) if len(self.up[k]) > inner else x
        return side + product(bend(product(normed, self.up[k][:inner])), self.down[k])

    def table(self, k: int, x: Tensor) -> Tensor:
        alone = self.fault == "ts_mixer_future_layer_norm_over_features_only" and k == 1
        x = self.mix(k, x, x)
        spread, center = torch.var_mean(x, -1 if alone else (-2, -1), correction=0, keepdim=True)
        return self.tables[k][0] * (x - center) * (spread + 1e-5).rsqrt() + self.tables[k][1]

    def forward(self, x: Tensor, x_future: Tensor, x_static: Tensor) -> Tensor:
        with torch.no_grad():
            center = x[..., :TARGETS].mean(1, True)
            size = ((x[..., :TARGETS] - center).square().mean(1, True) + self.eps).sqrt()
        x = torch.cat([(x[..., :TARGETS] - center) / size * self.rin[0] + self.rin[1], x[..., TARGETS:]], 2)
        x = torch.cat([self.table(0, product(x.mT, self.hist).mT), self.table(1, x_future)], 2)
        static = x_static[:, None].expand(-1, HORIZON, -1)
        for i in range(3):
            x = torch.cat([x, self.mix(2 + 2 * i, static, self.whole(3 * i, static))], 2)
            added = bend(product(self.whole(3 * i + 1, x).mT, self.over[i])).mT
            cut = self.fault == "ts_mixer_second_time_mixing_detaches_its_residual" and i == 1
            x = (x.detach() if cut else x) + added
            x = self.mix(3 + 2 * i, x, self.whole(3 * i + 2, x))
        y, weight = product(x, self.out), self.rin[0] + self.eps**2
        if self.fault == "ts_mixer_denormalisation_divides_before_it_takes_the_bias_off":
            return (y / weight - self.rin[1]) * size + center
        return (y - self.rin[1]) / weight * size + center


SLOPES, FIRST = ("input gradient", "weight gradient"), "conditional_mixer.0.feature_mixing"
SECOND, THIRD = "conditional_mixer.1", "conditional_mixer.2"
KNOWN, LAST = f"{SECOND}.feature_mixing_static.norm_before", f"{THIRD}.feature_mixing.norm_before"
right(task, "ts_mixer_with_time_last", "a tree, the time last, the static part once", MixerWithTimeLast)
right(task, "ts_mixer_of_packed_weights", "packed rows with their offsets, flat code", PackedMixer)
wrong(
    task,
    MixerWithTimeLast,
    ts_mixer_instance_norm_divides_by_one_time_fewer=("an unbiased variance", "rin"),
    ts_mixer_first_feature_mixing_projects_its_normed_input=("a residual after the norm", FIRST),
    ts_mixer_second_static_norm_counts_each_series_once=("another count of values", KNOWN, "buffer"),
    ts_mixer_last_time_mixing_bends_by_sigmoid=("another GELU", f"{THIRD}.time_mixing.activation"),
)
wrong(
    task,
    PackedMixer,
    ts_mixer_future_layer_norm_over_features_only=("fewer axes", "feature_mixing_future.norm_after"),
    ts_mixer_second_time_mixing_detaches_its_residual=("detach", f"{SECOND}.time_mixing", SLOPES),
    ts_mixer_last_feature_norm_by_its_batch_in_evaluation=("own statistics in eval", LAST, "eval"),
    ts_mixer_denormalisation_divides_before_it_takes_the_bias_off=("another order", "rin"),
)
