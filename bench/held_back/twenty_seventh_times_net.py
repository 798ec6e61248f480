"""Two ports of a small TimesNet: a tree with the channels last, and one class of packed taps."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_seventh_times_net import D_MODEL, PRED_LEN, TOP_K, TimesNet, seasons, squares

task = few("twenty_seventh_times_net", TimesNet, seasons, squares)


def spectrum(x: Tensor, index: Tensor) -> Tensor:
    """The amplitudes of [N, T, C] at these frequencies, by products with waves: [N, K]."""
    length = x.shape[1]
    turns = index[:, None] * torch.arange(length, device=x.device) % length
    angle = 2 * math.pi * turns.double() / length
    real, imaginary = angle.cos().to(x) @ x, angle.sin().to(x) @ x
    return (real.square() + imaginary.square()).sqrt().mean(2)


class Scales(nn.Module):
    """Square kernels of several sizes over [N, H, W, C]; their bias is one for each size."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.squares = nn.ParameterList(leaf(x.weight) for x in block.kernels)
        self.offsets = pile(x.bias for x in block.kernels)

    def forward(self, x: Tensor) -> Tensor:
        return sum(spatial(x, each) for each in self.squares) / len(self.squares) + self.offsets.mean(0)


class Season(nn.Module):
    """What the strongest periods of the batch add to [N, T, C]."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.scales = nn.Sequential(Scales(block.conv[0]), nn.GELU(), Scales(block.conv[2]))
        self.silent, self.alone = False, False

    def strongest(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            given = x[:1] if self.alone and not self.training else x
            power = spectrum(given, torch.arange(1, x.shape[1] // 2 + 1, device=x.device)).sum(0)
            return power.topk(TOP_K).indices + 1

    def forward(self, x: Tensor) -> Tensor:
        length, index = x.shape[1], self.strongest(x)
        share, added = spectrum(x, index).softmax(1), 0
        share = share.detach() if self.silent else share
        for j, frequency in enumerate(index.tolist()):
            period = length // frequency
            folded = F.pad(x, (0, 0, 0, -length % period)).unflatten(1, (-1, period))
            added = added + share[:, j, None, None] * self.scales(folded).flatten(1, 2)[:, :length]
        return added


class Entry(nn.Module):
    """Windows of three steps beside the marks, one product for both, places, then more steps."""

    def __init__(self, model: TimesNet, halves: bool):
        super().__init__()
        embedding, longer = model.enc_embedding, model.predict_linear
        conv, marks = embedding.value_embedding.tokenConv, embedding.temporal_embedding.embed
        self.rows = leaf(torch.cat([conv.weight.permute(2, 1, 0).flatten(0, 1), marks.weight.T]))
        places, apart = embedding.position_embedding.pe[0], [*range(0, D_MODEL, 2), *range(1, D_MODEL, 2)]
        self.register_buffer("places", places[:, apart] if halves else places.clone())
        self.steps, self.level = leaf(longer.weight.T), leaf(longer.bias[:, None])

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        beside = torch.cat([x.roll(1, 1), x, x.roll(-1, 1), marks], 2)
        x = beside @ self.rows + self.places[: x.shape[1]]
        return torch.einsum("nsc,st->ntc", x, self.steps) + self.level


class Body(nn.Module):
    def __init__(self, model: TimesNet):
        super().__init__()
        self.seasons = nn.ModuleList(map(Season, model.model))
        self.settle = model.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        for season in self.seasons:
            x = self.settle(x + season(x))
        return x


class TimesOfSeasons(Port):
    """A tree of entry, body and exit, all with the channels last; periods by products with waves."""

    def take(self, model: TimesNet) -> None:
        halves = self.fault == "times_net_sines_before_cosines_in_halves"
        self.entry, self.body, self.leave = Entry(model, halves), Body(model), model.projection
        self.body.seasons[1].silent = self.fault == "times_net_second_block_weighs_periods_without_gradient"
        self.body.seasons[2].alone = self.fault == "times_net_last_block_periods_of_one_sample_in_evaluation"

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        x = x_enc - (middle := x_enc.detach().mean(1, True))
        size = (x.square().mean(1, True) + 1e-5).sqrt()
        x = self.body(self.entry(x / size, x_mark_enc))
        y = self.leave(x[:, -PRED_LEN:])
        early = self.fault == "times_net_means_added_before_the_scaling"
        return (y + middle) * size if early else y * size + middle


def taps(kernels: nn.ModuleList, astray: bool = False) -> Tensor:
    """[O, C, 1 + 9 + 25] of the kernels, each with its axes swapped, but for the last one ``astray``."""
    each = [x.weight if astray and x is kernels[-1] else x.weight.mT for x in kernels]
    return torch.cat([x.flatten(2) for x in each], 2)


def levels(kernels: nn.ModuleList) -> Tensor:
    return torch.stack([x.bias for x in kernels], 1)


class PackedTimes(Port):
    """Channels first, folded with the period down; the taps of a block are put together as one kernel."""

    def take(self, model: TimesNet) -> None:
        embedding, blocks = model.enc_embedding, [x.conv for x in model.model]
        crooked = self.fault == "times_net_second_block_largest_kernel_transposed"
        self.up = pile(taps(x[0].kernels) for x in blocks)
        self.down = pile(taps(x[2].kernels, crooked and i == 1) for i, x in enumerate(blocks))
        self.up_bias, self.down_bias = (pile(levels(x[j].kernels) for x in blocks) for j in (0, 2))
        conv, marks = embedding.value_embedding.tokenConv, embedding.temporal_embedding.embed
        self.inlet = leaf(torch.cat([conv.weight.flatten(1), marks.weight], 1))
        self.later = leaf(torch.cat([model.predict_linear.weight, model.predict_linear.bias[:, None]], 1))
        self.norm = pile([model.layer_norm.weight, model.layer_norm.bias])
        self.outlet = leaf(torch.cat([model.projection.weight, model.projection.bias[:, None]], 1))
        self.register_buffer("sines", embedding.position_embedding.pe[0].T.clone())

    def whole(self, x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
        """One convolution by the mean of all kernels."""
        one, nine, many = packed.split([1, 9, 25], 2)
        kernel = F.pad(one.unflatten(2, (1, 1)), [2] * 4) + F.pad(nine.unflatten(2, (3, 3)), [1] * 4)
        return F.conv2d(x, (kernel + many.unflatten(2, (5, 5))) / 3, bias.mean(1), padding=2)

    def bend(self, i: int, x: Tensor) -> Tensor:
        if self.fault == "times_net_first_block_gelu_by_a_sigmoid" and i == 0:
            return x * torch.sigmoid(1.702 * x)
        return x / 2 * (1 + torch.erf(x * math.sqrt(0.5)))

    def block(self, i: int, x: Tensor) -> Tensor:
        length, wave = x.shape[2], torch.fft.fft(x)
        stuck = "times_net_third_block_padded_by_its_last_step"
        power = torch.hypot(wave.real, wave.imag).mean(1)
        strong = power[:, 1 : length // 2 + 1].detach().mean(0).sort(descending=True)[1][:TOP_K] + 1
        rates, told = (power[:, strong] - power[:, strong].logsumexp(1, True)).exp(), []
        for frequency in strong.tolist():
            period = length // frequency
            edge = x[:, :, -1:] if self.fault == stuck and i == 2 else torch.zeros_like(x[:, :, :1])
            y = torch.cat([x, edge.expand(-1, -1, -length % period)], 2).unflatten(2, (-1, period)).mT
            y = self.bend(i, self.whole(y, self.up[i], self.up_bias[i]))
            y = self.whole(y, self.down[i], self.down_bias[i])
            told.append(y.mT.flatten(2)[:, :, :length])
        return x + torch.einsum("knct,nk->nct", torch.stack(told), rates)

    def settle(self, x: Tensor) -> Tensor:
        gain, shift = self.norm[:, :, None]
        spread, middle = torch.var_mean(x, 1, correction=0, keepdim=True)
        return gain * (x - middle) / (spread + 1e-5).sqrt() + shift

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        count, x = x_enc.shape[1], x_enc.mT
        middle, spread = x.mean(2, True).detach(), (x.var(2, keepdim=True) * (1 - 1 / count) + 1e-5).sqrt()
        x = (x - middle) / spread
        zeros = self.fault == "times_net_token_convolution_padded_with_zeros"
        x = F.pad(x, (1, 1), "constant" if zeros else "circular").unfold(2, 3, 1).mT.flatten(1, 2)
        steps, level = self.later[:, :-1].T, self.later[:, -1]
        x = self.inlet @ (torch.cat([x, x_mark_enc.mT], 1) @ steps) + self.sines[:, :count] @ steps + level
        for i in range(len(self.up)):
            x = self.settle(self.block(i, x))
        y = self.outlet[:, :-1] @ x[:, :, count:] + self.outlet[:, -1:]
        return torch.addcmul(middle, y, spread).mT


SLOPES = "input gradient", "weight gradient"
right(task, "times_net_of_seasons_with_channels_last", "a tree, waves for an FFT", TimesOfSeasons)
right(task, "times_net_of_packed_taps", "packed stacks, merged kernels, another order", PackedTimes)
wrong(
    task,
    TimesOfSeasons,
    times_net_sines_before_cosines_in_halves=("another order", "enc_embedding.position_embedding"),
    times_net_second_block_weighs_periods_without_gradient=("detach", "model.1", SLOPES),
    times_net_last_block_periods_of_one_sample_in_evaluation=("one sample in eval", "model.2", "eval"),
    times_net_means_added_before_the_scaling=("an order of operations", ""),
)
wrong(
    task,
    PackedTimes,
    times_net_token_convolution_padded_with_zeros=("padding", "enc_embedding.value_embedding.tokenConv"),
    times_net_first_block_gelu_by_a_sigmoid=("an approximation", "model.0.conv.1"),
    times_net_second_block_largest_kernel_transposed=("a transposed kernel", "model.1.conv.2.kernels.2"),
    times_net_third_block_padded_by_its_last_step=("other padding", "model.2"),
)
