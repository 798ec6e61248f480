"""Two ports of a small Open-Unmix: a tree with the channels last, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.held_back._forty_third_open_unmix as unmix
from bench.held_back._fifth_vision import right
from bench.held_back._forty_third_open_unmix import CHANNELS, EPS, HIDDEN, MAX_BIN, N_FFT, N_HOP
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_third_open_unmix", unmix.Separator, unmix.songs, unmix.magnitudes_and_waves)
EDGE, BINS = N_FFT // 2, N_FFT // 2 + 1


def overlap(columns: Tensor) -> Tensor:
    size = N_FFT + N_HOP * (columns.shape[2] - 1)
    return F.fold(columns, (1, size), (1, N_FFT), stride=(1, N_HOP))[..., 0, EDGE:-EDGE]


class Transform(nn.Module):
    """[N, C, T] -> complex [N, frames, bins, C], and back."""

    def __init__(self, ahead: Tensor, back: Tensor):
        super().__init__()
        self.register_buffer("ahead", ahead.clone()), self.register_buffer("behind", back.clone())

    def forward(self, x: Tensor) -> Tensor:
        frames = F.pad(x, (EDGE, EDGE), mode="reflect").unfold(2, N_FFT, N_HOP)
        return torch.fft.rfft(frames * self.ahead).movedim(1, 3)

    def back(self, x: Tensor) -> Tensor:
        columns = torch.fft.irfft(x, n=N_FFT, dim=2).permute(0, 3, 2, 1) * self.behind[:, None]
        weight = self.behind.square()[None, :, None].expand(1, -1, columns.shape[3])
        return overlap(columns.flatten(1, 2)) / overlap(weight)


class Line(nn.Module):
    """A recurrent layer that reads in both directions, each with a network of its own."""

    def __init__(self, lstm: nn.LSTM, layer: int):
        super().__init__()
        self.ahead, self.back = (nn.LSTM(HIDDEN, HIDDEN // 2, batch_first=True) for _ in range(2))
        for one, end in ((self.ahead, ""), (self.back, "_reverse")):
            for name in ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l"):
                one.get_parameter(f"{name}0").data.copy_(lstm.get_parameter(f"{name}{layer}{end}"))
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        back = self.back(x.flip(1))[0]
        return torch.cat([self.ahead(x)[0], back if self.turned else back.flip(1)], 2)


class Voice(nn.Module):
    """Takes the two halves of the concatenation by two weights; [N, frames, bins, C] in and out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.low, self.slope = leaf(-model.input_mean), leaf(model.input_scale)
        self.weight, self.norm = leaf(model.fc1.weight.unflatten(1, (CHANNELS, -1))), Rows(model.bn1)
        self.lines = nn.Sequential(*(Line(model.lstm, i) for i in range(3)))
        self.skip, self.read = map(leaf, model.fc2.weight.T.chunk(2))
        self.wide, self.inner, self.outer = leaf(model.fc3.weight.T), Rows(model.bn2), Rows(model.bn3)
        self.rate, self.base, self.silent = leaf(model.output_scale), leaf(model.output_mean), False

    def forward(self, size: Tensor) -> Tensor:
        x = size[:, :, :MAX_BIN] - self.low[:, None]
        x = self.norm(torch.einsum("nlbc,hcb,b->nlh", x, self.weight, self.slope)).tanh()
        x = (x.detach() if self.silent else x) @ self.skip + self.lines(x) @ self.read
        x = self.outer(self.inner(x).relu() @ self.wide).unflatten(2, (CHANNELS, -1)).transpose(2, 3)
        return torch.addcmul(self.base[:, None], x, self.rate[:, None]).relu() * size.detach()


class UnmixOfVoices(Port):
    """An analysis, a voice for each target, and a synthesis, with the channels last."""

    def take(self, model: unmix.Separator) -> None:
        fault, window = self.fault, model.stft.window
        if fault == "open_unmix_analysis_window_is_symmetric":
            window = torch.hann_window(N_FFT, periodic=False).to(window)
        self.transform = Transform(window, model.istft.window)
        self.voices = nn.ModuleList(Voice(model.target_models[name]) for name in unmix.TARGETS)
        self.voices[0].lines[1].turned = fault == "open_unmix_second_backward_layer_is_not_turned_again"
        self.voices[1].silent = fault == "open_unmix_skip_of_the_drums_without_gradient"
        self.voices[0].outer.own = fault == "open_unmix_vocals_last_norm_by_batch_in_evaluation"

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        mixture = self.transform(audio)
        found = [voice(mixture.abs()) for voice in self.voices]
        share = mixture / (sum(found) + EPS)
        waves = torch.stack([self.transform.back(share * each) for each in found], 1)
        return waves, torch.stack(found, 1).permute(0, 1, 4, 3, 2)


def packed(lstm: nn.LSTM, layer: int) -> Tensor:
    """[2, 4 H, 2 H + H + 2]: for both directions the weights and the biases side by side."""
    weights = list(lstm.parameters())[8 * layer : 8 * layer + 8]
    return torch.stack([torch.cat([*x[:2], torch.stack(x[2:], 1)], 1) for x in (weights[:4], weights[4:])])


class StackedUnmix(Port):
    """Both targets at once by stacked weights; the transforms are products with sines."""

    def take(self, model: unmix.Separator) -> None:
        models = list(model.target_models.values())
        self.enter, self.join = pile(x.fc1.weight for x in models), pile(x.fc2.weight for x in models)
        self.widen = pile(x.fc3.weight for x in models)
        self.given = pile(torch.stack([x.input_mean, x.input_scale]) for x in models)
        self.made = pile(torch.stack([x.output_mean, x.output_scale]) for x in models)
        self.cells = pile(torch.stack([packed(x.lstm, i) for x in models]) for i in range(3))
        for name in ("weight", "bias", "running_mean", "running_var"):
            rows = [torch.cat([getattr(y, name) for y in (x.bn1, x.bn2, x.bn3)]) for x in models]
            if name in ("weight", "bias"):
                self.register_parameter(name, pile(rows))
            else:
                self.register_buffer(name, torch.stack(rows))
        self.register_buffer("window", model.stft.window.clone())

    def norm(self, x: Tensor, start: int) -> Tensor:
        """A batch norm of [K, N, frames, width] by target and column."""
        span, count = slice(start, start + x.shape[3]), x[0, ..., 0].numel()
        mean, var = self.running_mean[:, span], self.running_var[:, span]
        if self.training:
            own = x.mean((1, 2)), x.var((1, 2), correction=0)
            with torch.no_grad():
                mean.mul_(0.9).add_(0.1 * own[0])
                var.mul_(0.9).add_(0.1 * own[1] * count / (count - 1))
            mean, var = own
        eps = x.new_full((len(x), 1), 1e-5)
        if self.fault == "open_unmix_first_norm_of_the_vocals_with_a_larger_epsilon" and start == 0:
            eps[0] = 1e-3
        gain = self.weight[:, span] / (var + eps).sqrt()
        return x * gain[:, None, None] + (self.bias[:, span] - mean * gain)[:, None, None]

    def recur(self, x: Tensor, layer: int) -> Tensor:
        w, u, b, c = self.cells[layer].split([HIDDEN, HIDDEN // 2, 1, 1], 3)
        both = torch.stack([x, x.flip(2)], 1)
        given = torch.einsum("kdnli,kdgi->lkdng", both, w) + (b + c).transpose(2, 3)
        h = s = given.new_zeros(*given.shape[1:4], HIDDEN // 2)
        late, states = given.new_zeros(len(x), 1, 1, 1), []
        late[1] = float(self.fault == "open_unmix_drums_first_layer_adds_one_to_forget" and layer == 0)
        for step in given:
            i, f, g, o = (step + h @ u.transpose(2, 3)).chunk(4, 3)
            s = (f + late).sigmoid() * s + i.sigmoid() * g.tanh()
            h = o.sigmoid() * s.tanh()
            states.append(h)
        ahead, back = torch.stack(states, 3).unbind(1)
        return torch.cat([ahead, back.flip(2)], 3)

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.arange(BINS)[:, None] * torch.arange(N_FFT).to(audio) * (math.tau / N_FFT)
        waves = torch.cat([turn.cos(), -turn.sin()])
        at = torch.arange(0, audio.shape[2] + 1, N_HOP)[:, None] + torch.arange(N_FFT)
        parts = (F.pad(audio, (EDGE, EDGE), mode="reflect")[..., at] * self.window) @ waves.T
        size = torch.complex(*parts.chunk(2, 3)).abs()
        shift, rate = self.given[:, :, None, None, None].unbind(1)
        x = ((size[..., :MAX_BIN] + shift) * rate).transpose(2, 3).flatten(3)
        x = y = self.norm(torch.einsum("knli,koi->knlo", x, self.enter), 0).tanh()
        for layer in range(3):
            y = self.recur(y, layer)
        x = torch.einsum("knli,koi->knlo", torch.cat([x, y], 3), self.join)
        x = torch.einsum("knli,koi->knlo", self.norm(x, HIDDEN).clamp(min=0), self.widen)
        x = self.norm(x, 2 * HIDDEN).unflatten(3, (CHANNELS, BINS)).transpose(2, 3)
        base, rate = self.made[:, :, None, None, None].unbind(1)
        found = ((x * rate + base).clamp(min=0) * size.detach()).transpose(0, 1)
        total = found.sum(1, True)
        if self.fault == "open_unmix_soft_mask_takes_its_sum_for_a_constant":
            total = total.detach()
        twice = torch.full((BINS,), 2 / N_FFT).to(audio)
        twice[0] = twice[-1] = 1 / N_FFT
        back = (parts[:, None] * (found / (total + EPS) * twice).repeat(1, 1, 1, 1, 2)) @ waves * self.window
        fade = self.window if self.fault == "open_unmix_overlap_divided_by_windows" else self.window**2
        empty = audio.new_zeros(*back.shape[:3], audio.shape[2] + N_FFT)
        weight = empty[0, 0, 0].index_add(0, at.flatten(), fade.repeat(len(at)))
        out = empty.index_add(3, at.flatten(), back.flatten(3))[..., EDGE:-EDGE] / weight[EDGE:-EDGE]
        return out, found.transpose(3, 4)


GRADIENTS = ("input gradient", "weight gradient")
right(task, "open_unmix_of_voices_with_channels_last", "a tree, split weights, one-way layers", UnmixOfVoices)
right(task, "open_unmix_of_stacked_targets", "packed stacks, cells by hand, sines", StackedUnmix)
wrong(
    task,
    UnmixOfVoices,
    open_unmix_analysis_window_is_symmetric=("another window", "stft"),
    open_unmix_second_backward_layer_is_not_turned_again=("time reversed", "target_models.vocals.lstm"),
    open_unmix_skip_of_the_drums_without_gradient=("detach", "target_models.drums", GRADIENTS),
    open_unmix_vocals_last_norm_by_batch_in_evaluation=("own statistics", "target_models.vocals.bn3", "eval"),
)
wrong(
    task,
    StackedUnmix,
    open_unmix_first_norm_of_the_vocals_with_a_larger_epsilon=("epsilon", "target_models.vocals.bn1"),
    open_unmix_drums_first_layer_adds_one_to_forget=("a constant added", "target_models.drums.lstm"),
    open_unmix_soft_mask_takes_its_sum_for_a_constant=("detach", "", GRADIENTS),
    open_unmix_overlap_divided_by_windows=("another normalisation", "istft"),
)
