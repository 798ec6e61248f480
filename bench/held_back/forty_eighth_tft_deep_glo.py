"""Two ports of a small hybrid forecaster: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_eighth_tft_deep_glo as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

CHANNELS, LENGTH, HORIZON, WINDOW = known.CHANNELS, known.LENGTH, known.HORIZON, known.WINDOW
KERNEL, EXPERTS, LEVELS, EPS = known.KERNEL, known.EXPERTS, known.LEVELS, known.EPS
task = few("forty_eighth_tft_deep_glo", known.HybridForecaster, known.seasons, known.masked_loss)


def smooth(x: Tensor, zeros: bool) -> Tensor:
    """The moving average of [N, T, C] by running sums."""
    edge = WINDOW // 2
    wide = x[:, torch.arange(-edge, LENGTH + edge).clamp(0, LENGTH - 1)]
    total = F.pad((F.pad(x, (0, 0, edge, edge)) if zeros else wide).cumsum(1), (0, 0, 1, 0))
    return (total[:, WINDOW:] - total[:, :-WINDOW]) / WINDOW


class Heads(nn.Module):
    """The linear heads of all channels at once."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.weight, self.bias = pile(x.weight.T for x in layers), pile(x.bias for x in layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ntc,cth->nhc", x, self.weight) + self.bias.T


class Causal(nn.Module):
    """A convolution of [N, T, C] that looks back, tap by tap, with a direction and a length."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        size, direction = conv.parametrizations.weight.parameters()
        self.size, self.direction = leaf(size.flatten()), leaf(direction.permute(2, 1, 0))
        self.bias, self.step = leaf(conv.bias), conv.dilation[0]

    def forward(self, x: Tensor) -> Tensor:
        taps = enumerate(self.direction.flip(0))
        y = sum(F.pad(x, (0, 0, i * self.step, 0))[:, :LENGTH] @ matrix for i, matrix in taps)
        return y * self.size / self.direction.square().sum((0, 1)).sqrt() + self.bias


class Residual(nn.Module):
    def __init__(self, block: nn.Module, bare: bool):
        super().__init__()
        self.one, self.two, self.bare = Causal(block.conv1), Causal(block.conv2), bare
        self.short = nn.Identity()
        if block.downsample is not None:
            self.short = nn.Linear(*block.downsample.weight.shape[1::-1])
            self.short.weight, self.short.bias = (leaf(x.squeeze(-1)) for x in block.downsample.parameters())

    def forward(self, x: Tensor) -> Tensor:
        y = self.short(x) + self.two(self.one(x).clamp(min=0)).clamp(min=0)
        return y if self.bare else y.clamp(min=0)


class Blend(nn.Module):
    """The mixture over the horizon, and the offsets of its quantiles."""

    def __init__(self, model: nn.Module):
        super().__init__()
        gate, shift = model.mixture.gate, model.quantiles.proj
        self.gate, self.level = (leaf(x.unflatten(0, (HORIZON, EXPERTS))) for x in (gate.weight, gate.bias))
        self.shift, self.base = (leaf(x.unflatten(0, (-1, HORIZON))) for x in (shift.weight, shift.bias))
        self.apart = self.ordered = False

    def forward(self, h: Tensor, forecasts: tuple[Tensor, ...]) -> Tensor:
        score = torch.einsum("nw,hew->neh", h.detach() if self.apart else h, self.gate) + self.level.T
        share = (score - score.logsumexp(1, True)).exp()[..., None]
        middle = sum(share[:, i] * y for i, y in enumerate(forecasts))
        shift = torch.einsum("nw,qhw->nqh", h, self.shift) + self.base
        if self.ordered and not self.training:
            shift = shift.sort(1).values
        return middle[:, None] + shift[..., None]


class ForecasterOfParts(Port):
    """A tree of parts, channels last; the statistics are kept in the forward pass."""

    def take(self, model: nn.Module) -> None:
        fault, norm, line = self.fault, model.revin, model.dlinear
        self.scale, self.offset = leaf(norm.affine_weight), leaf(norm.affine_bias)
        self.fast, self.slow = Heads(line.Linear_Seasonal), Heads(line.Linear_Trend)
        bare = fault == "tft_deep_glo_second_residual_sum_without_its_relu"
        self.deep = nn.Sequential(*(Residual(x, bare and i == 1) for i, x in enumerate(model.tcn.network)))
        self.out, self.rest = leaf(model.linear.weight.T), leaf(model.linear.bias)
        self.blend = Blend(model)
        self.blend.apart = fault == "tft_deep_glo_mixture_gate_reads_a_detached_state"
        self.blend.ordered = fault == "tft_deep_glo_quantile_offsets_sorted_in_evaluation"

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            share = mask / mask.sum(1, keepdim=True).clamp(min=1).to(x)
            middle = (x * share).sum(1, keepdim=True)
            spread = (((x - middle) ** 2 * share).sum(1, keepdim=True) + EPS) ** 0.5
        x = torch.where(mask, torch.addcmul(self.offset, (x - middle) / spread, self.scale), 0)
        h = self.deep(torch.cat([x, mask.to(x)], -1))[:, -1]
        slow = smooth(x, self.fault == "tft_deep_glo_moving_average_pads_with_zeros")
        deep = (h @ self.out + self.rest).unflatten(1, (HORIZON, CHANNELS))
        y = self.blend(h, (self.slow(slow) + self.fast(x - slow), deep, x[:, -1:]))
        gain = spread[:, None] / (self.scale + EPS**2)
        return y * gain + (middle[:, None] - self.offset * gain)


def sheet(conv: nn.Module) -> nn.Parameter:
    """A row for each channel: its direction, its length and its bias."""
    size, direction = (x.flatten(1) for x in conv.parametrizations.weight.parameters())
    return leaf(torch.cat([direction, size, conv.bias[:, None]], 1))


def rows(layer: nn.Module) -> Tensor:
    """A row for each output: its weights and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


class PackedForecaster(Port):
    """One class of packed weights, channels first; only the last step's past is looked at by windows."""

    def take(self, model: nn.Module) -> None:
        blocks, line = model.tcn.network, model.dlinear
        self.affine = pile([model.revin.affine_weight, model.revin.affine_bias])
        self.convs = nn.ParameterList(sheet(x) for block in blocks for x in (block.conv1, block.conv2))
        self.short = nn.ParameterList(leaf(rows(x.downsample)) for x in blocks[:2])
        self.lines = pile(torch.stack([*map(rows, x)]) for x in (line.Linear_Seasonal, line.Linear_Trend))
        self.ends = leaf(torch.cat([*map(rows, (model.linear, model.mixture.gate, model.quantiles.proj))]))

    def causal(self, x: Tensor, i: int) -> Tensor:
        """The convolution number ``i`` of [N, C, T]."""
        direction, size, bias = self.convs[i].split([self.convs[i].shape[1] - 2, 1, 1], 1)
        step, long = 2 ** (i // 2), torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        if self.fault == "tft_deep_glo_weight_norm_gain_of_one_layer_not_trained" and i == 3:
            size = size.detach()
        if self.fault == "tft_deep_glo_last_convolution_dilated_by_three" and i == 5:
            step = 3
        past = F.pad(x, ((KERNEL - 1) * step, 0))
        taps = torch.stack([past[..., k * step : k * step + LENGTH] for k in range(KERNEL)], 2)
        return torch.relu(size / long * direction @ taps.flatten(1, 2) + bias)

    def straight(self, x: Tensor) -> Tensor:
        """The heads' forecast [N, C, H] of [N, C, T]."""
        wide = F.pad(x, (WINDOW // 2,) * 2, mode="replicate")
        trend, lines, bias = wide.unfold(2, WINDOW, 1).mean(3), self.lines, self.lines[..., -1]
        both = torch.stack([x - trend, trend])
        if self.fault == "tft_deep_glo_fourth_trend_head_takes_the_bias_of_the_third":
            bias = bias[[[0], [1]], [[0, 1, 2, 3, 4], [0, 1, 2, 2, 4]]]
        return (torch.einsum("kncl,kchl->knch", both, lines[..., :-1]) + bias[:, None]).sum(0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, seen = x.transpose(1, 2), mask.transpose(1, 2).to(x)
        count, (gain, offset) = seen.sum(2, True).clamp(min=1), self.affine[..., None]
        mean = ((x * seen).sum(2, True) / count).detach()
        fewer = 1 if self.fault == "tft_deep_glo_spread_of_a_sample_not_of_a_population" else 0
        var = (((x - mean) * seen) ** 2).sum(2, True) / (count - fewer)
        std = (var.detach() + EPS).sqrt()
        x = ((x - mean) * (gain / std) + offset) * seen
        h = torch.cat([x, seen], 1)
        for i in range(3):
            y, short = self.causal(self.causal(h, 2 * i), 2 * i + 1), h
            if i < len(self.short):
                short = self.short[i][:, :-1] @ h + self.short[i][:, -1:]
            h = torch.relu(y + short)
        told = F.linear(F.pad(h[..., -1], (0, 1), value=1.0), self.ends)
        deep, gate, shift = told.split([HORIZON * CHANNELS, HORIZON * EXPERTS, HORIZON * len(LEVELS)], 1)
        deep = deep.unflatten(1, (HORIZON, CHANNELS)).mT
        a, b, c = gate.unflatten(1, (1, HORIZON, EXPERTS)).softmax(3).unbind(3)
        point = a * self.straight(x) + b * deep + c * x[..., -1:]
        y = (point[:, None] + shift.unflatten(1, (len(LEVELS), 1, HORIZON)) - offset) / (gain + EPS**2) * std[
            :, None
        ] + mean[:, None]
        return y.mT


SLOPES, GAIN = ("input gradient", "weight gradient"), "tcn.network.1.conv2.parametrizations.weight"
SECOND = "tcn.network.1.conv2", GAIN, GAIN + ".0"
right(task, "tft_deep_glo_of_parts", "a tree, channels last, running sums", ForecasterOfParts)
right(task, "tft_deep_glo_of_packed_weights", "packed weights, windows, fused heads", PackedForecaster)
wrong(
    task,
    ForecasterOfParts,
    tft_deep_glo_moving_average_pads_with_zeros=("another padding", "dlinear.decompsition.moving_avg"),
    tft_deep_glo_second_residual_sum_without_its_relu=("left out", ("tcn.network.1", "tcn.network.1.relu")),
    tft_deep_glo_mixture_gate_reads_a_detached_state=("detach", ("mixture", "mixture.gate"), SLOPES),
    tft_deep_glo_quantile_offsets_sorted_in_evaluation=("a sort in eval", "quantiles", "eval"),
)
wrong(
    task,
    PackedForecaster,
    tft_deep_glo_spread_of_a_sample_not_of_a_population=("a count off by one", "revin"),
    tft_deep_glo_weight_norm_gain_of_one_layer_not_trained=("detached gain", SECOND, SLOPES[1]),
    tft_deep_glo_last_convolution_dilated_by_three=("another dilation", "tcn.network.2.conv2"),
    tft_deep_glo_fourth_trend_head_takes_the_bias_of_the_third=("another's bias", "dlinear.Linear_Trend.3"),
)
