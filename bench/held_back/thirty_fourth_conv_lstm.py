"""Two ports of a ConvLSTM forecaster: a tree of gates, frame by frame, and packed sheets, layer by layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_conv_lstm import AHEAD, EF, SLOPE, ConvLSTM, showers, weighted_mse_mae

task = few("thirty_fourth_conv_lstm", EF, showers, weighted_mse_mae)


class Gate(nn.Module):
    """One gate of a cell, with a peephole or as a candidate: [N, H, W, C] -> [N, H, W, F]."""

    def __init__(self, cell: ConvLSTM, index: int, sight: Tensor | None = None):
        super().__init__()
        width, self.groups, self.silent = cell.Wci.shape[1], 0, False
        own = slice(index * width, (index + 1) * width)
        weight = cell._conv.weight[own]
        self.given, self.held = leaf(weight[:, :-width]), leaf(weight[:, -width:])
        self.bias = leaf(cell._conv.bias[own])
        self.sight = None if sight is None else leaf(sight[0].permute(1, 2, 0))
        if isinstance(cell._norm, nn.GroupNorm):
            self.groups, self.eps = cell._norm.num_groups // 4, cell._norm.eps
            self.scale, self.shift = leaf(cell._norm.weight[own]), leaf(cell._norm.bias[own])

    def forward(self, x: Tensor | None, h: Tensor, c: Tensor) -> Tensor:
        if x is None:
            x = h.new_zeros(*h.shape[:3], self.given.shape[1])
        y = spatial(x, self.given, self.bias) + spatial(h, self.held)
        if self.groups:
            y = y.unflatten(3, (self.groups, -1))
            spread, center = torch.var_mean(y, (1, 2, 4), correction=0, keepdim=True)
            y = ((y - center) / (spread + self.eps).sqrt()).flatten(3) * self.scale + self.shift
        if self.sight is None:
            return y.tanh()
        return (y + self.sight * (c.detach() if self.silent else c)).sigmoid()


class Cell(nn.Module):
    def __init__(self, cell: ConvLSTM):
        super().__init__()
        self.enter, self.keep = Gate(cell, 0, cell.Wci), Gate(cell, 1, cell.Wcf)
        self.new, self.leave, self.late = Gate(cell, 2), Gate(cell, 3, cell.Wco), False

    def forward(self, x: Tensor | None, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        new = self.enter(x, h, c) * self.new(x, h, c) + self.keep(x, h, c) * c
        return self.leave(x, h, c if self.late else new) * new.tanh(), new


class Filter(nn.Module):
    """A convolution of [N, H, W, C] and a leaky ReLU of this slope."""

    def __init__(self, layer: nn.Module, stride: int = 1, slope: float = SLOPE):
        super().__init__()
        self.weight, self.bias, self.stride, self.slope = leaf(layer.weight), leaf(layer.bias), stride, slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(spatial(x, self.weight, self.bias, self.stride), self.slope)


class Doubling(Filter):
    """A transposed convolution as a plain one, by the turned kernel, of pixels with zeros between."""

    def __init__(self, layer: nn.ConvTranspose2d, turned: bool = True):
        super().__init__(layer)
        self.weight = leaf(layer.weight.transpose(0, 1).flip([2, 3] if turned else []))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.pad(x[:, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1)).flatten(3, 4).flatten(1, 2)
        return super().forward(F.pad(wide, (0, 0, 1, 0, 1, 0)))


class ForecasterOfGates(Port):
    """Cells of single gates, channels last; each frame passes both scales before the next."""

    def take(self, model: EF) -> None:
        (seen, told), fault = (model.encoder, model.forecaster), self.fault
        self.down = nn.ModuleList([Filter(seen.stage1[0], 2), Filter(seen.stage2[0], 2)])
        self.watch = nn.ModuleList([Cell(seen.rnn1), Cell(seen.rnn2)])
        self.tell = nn.ModuleList([Cell(told.rnn1), Cell(told.rnn2)])
        last = Doubling(told.stage1[0]), Filter(told.stage1[2]), Filter(told.stage1[4], slope=1.0)
        turned = fault != "conv_lstm_first_upsampling_kernel_not_turned"
        self.up = nn.ModuleList([nn.Sequential(*last), Doubling(told.stage2[0], turned)])
        self.tell[0].late = fault == "conv_lstm_last_output_gate_peeks_at_the_old_memory"
        self.watch[0].keep.silent = fault == "conv_lstm_first_forget_peephole_lets_no_gradient_through"
        if fault == "conv_lstm_forecast_norm_has_one_group_a_gate":
            for gate in self.tell[1].children():
                gate.groups = 1

    def forward(self, input: Tensor) -> Tensor:
        zeros = [input.new_zeros(len(input), *cell.enter.sight.shape) for cell in self.watch]
        states, frames = [(zero, zero) for zero in zeros], []
        for x in input.movedim(2, 4).unbind(1):
            for i in (0, 1):
                states[i] = self.watch[i](self.down[i](x), *states[i])
                x = states[i][0]
        for _ in range(AHEAD):
            x = None
            for i in (1, 0):
                states[i] = self.tell[i](x, *states[i])
                x = self.up[i](states[i][0])
            frames.append(x)
        return torch.stack(frames, 1).movedim(4, 2)


def sheet(layer: nn.Module) -> Tensor:
    """A row for each channel: its offset and its kernel."""
    return torch.cat([layer.bias[:, None], layer.weight.flatten(1)], 1)


class PackedForecaster(Port):
    """Sheets times patches: what is given to a cell first, for all frames at once, then what it holds."""

    def take(self, model: EF) -> None:
        seen, told = model.encoder, model.forecaster
        cells, last = (seen.rnn1, seen.rnn2, told.rnn2, told.rnn1), told.stage1
        self.cells = nn.ParameterList(leaf(sheet(x._conv)) for x in cells)
        self.sights = nn.ParameterList(leaf(torch.cat([x.Wci, x.Wcf, x.Wco])) for x in cells)
        self.norms = leaf(torch.stack([torch.stack([x._norm.weight, x._norm.bias]) for x in cells[1:3]]))
        plain, ups = (seen.stage1[0], seen.stage2[0], last[2], last[4]), (told.stage2[0], last[0])
        self.plain = nn.ParameterList(leaf(sheet(x)) for x in plain)
        self.ups = nn.ParameterList(leaf(x.weight.flatten(1).T) for x in ups)
        self.offsets = leaf(torch.cat([x.bias for x in ups]))

    def product(self, x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
        """[N, C, H, W] by rows of kernels -> [N, O, H / stride, W / stride]."""
        size = math.isqrt(kernel.shape[1] // x.shape[1])
        return (kernel @ F.unfold(x, size, 1, size // 2, stride)).unflatten(2, (x.shape[2] // stride, -1))

    def filtered(self, i: int, x: Tensor, stride: int, slope: float = SLOPE) -> Tensor:
        y = self.product(x, self.plain[i][:, 1:], stride)
        return F.leaky_relu(y + self.plain[i][:, 0, None, None], slope)

    def doubled(self, i: int, x: Tensor) -> Tensor:
        y = F.fold(self.ups[i] @ x.flatten(2), [2 * k for k in x.shape[2:]], 4, padding=1, stride=2)
        return F.leaky_relu(y + self.offsets.tensor_split([8])[i][:, None, None], SLOPE)

    def normed(self, i: int, y: Tensor) -> Tensor:
        y, (scale, shift) = y.unflatten(1, (8, -1)), self.norms[i - 1][:, :, None, None]
        y = y - y.mean((2, 3, 4), True)
        eps = 1e-3 if self.fault == "conv_lstm_encoder_norm_of_a_larger_epsilon" and i == 1 else 1e-5
        return (y * (y.square().mean((2, 3, 4), True) + eps).rsqrt()).flatten(1, 2) * scale + shift

    def run(self, k: int, x: Tensor | None, h: Tensor, c: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Cell k on frames [S N, C, H, W], or on none; all its h, then its last h and c."""
        sheet, (enter, keep, leave), width = self.cells[k], self.sights[k], self.sights[k].shape[1]
        held, given, found = sheet[:, -9 * width :], sheet[:, 0, None, None].expand(steps, 1, -1, 1, 1), []
        if x is not None:
            given = given + self.product(x, sheet[:, 1 : -9 * width]).unflatten(0, (steps, -1))
        if self.fault == "conv_lstm_forecast_peepholes_of_input_and_forget_swapped" and k == 2:
            enter, keep = keep, enter
        for one in given:
            y = one + self.product(h, held)
            i, f, g, o = (self.normed(k, y) if k in (1, 2) else y).unflatten(1, (4, -1)).unbind(1)
            new = torch.sigmoid(f + keep * c) * c + torch.sigmoid(i + enter * c) * g.tanh()
            if self.fault == "conv_lstm_memory_zoned_out_in_evaluation" and k == 1 and not self.training:
                new = 0.9 * new + 0.1 * c
            c = new
            h = torch.sigmoid(o + leave * c) * c.tanh()
            found.append(h)
        return torch.cat(found), h, c

    def forward(self, input: Tensor) -> Tensor:
        x, states = input.transpose(0, 1).flatten(0, 1), [[], []]
        for k in (0, 1):
            slope = 0.01 if self.fault == "conv_lstm_first_leak_of_the_default_slope" and k == 0 else SLOPE
            x = self.filtered(k, x, 2, slope)
            zero = x.new_zeros(len(input), *self.sights[k].shape[1:])
            x, *states[k] = self.run(k, x, zero, zero, input.shape[1])
        x = self.doubled(0, self.run(2, None, *states[1], AHEAD)[0])
        x = self.doubled(1, self.run(3, x, *states[0], AHEAD)[0])
        x = self.filtered(3, self.filtered(2, x, 1), 1, 1.0)
        return x.unflatten(0, (AHEAD, -1)).transpose(0, 1)


right(task, "conv_lstm_of_gates_with_channels_last", "a tree of gates, frame by frame", ForecasterOfGates)
right(task, "conv_lstm_of_packed_sheets", "packed sheets, products of patches", PackedForecaster)
wrong(
    task,
    ForecasterOfGates,
    conv_lstm_first_forget_peephole_lets_no_gradient_through=("detach", "encoder.rnn1", GRADIENTS),
    conv_lstm_forecast_norm_has_one_group_a_gate=("other groups", "forecaster.rnn2._norm"),
    conv_lstm_first_upsampling_kernel_not_turned=("a mirrored kernel", "forecaster.stage2.deconv1_leaky_1"),
    conv_lstm_last_output_gate_peeks_at_the_old_memory=("an old state", "forecaster.rnn1"),
)
wrong(
    task,
    PackedForecaster,
    conv_lstm_first_leak_of_the_default_slope=("another slope", "encoder.stage1.leaky_conv1_leaky_1"),
    conv_lstm_encoder_norm_of_a_larger_epsilon=("epsilon", "encoder.rnn2._norm"),
    conv_lstm_memory_zoned_out_in_evaluation=("a mean of states in eval", "encoder.rnn2", "eval"),
    conv_lstm_forecast_peepholes_of_input_and_forget_swapped=("swapped weights", "forecaster.rnn2"),
)
