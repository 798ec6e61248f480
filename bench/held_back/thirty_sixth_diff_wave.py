"""Two ports of a small DiffWave: a tree with the channels last, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_sixth_diff_wave import CYCLE, HOPS, LAYERS, DiffWave, noise_missed, voices

task = few("thirty_sixth_diff_wave", DiffWave, voices, noise_missed)


def dense(layer: nn.Module) -> nn.Linear:
    """A linear layer of the last axis, from one or from a convolution of width one."""
    weight = layer.weight.flatten(1)
    return filled(nn.Linear(*weight.T.shape), weight, layer.bias)


class Clock(nn.Module):
    def __init__(self, embedding: nn.Module):
        super().__init__()
        self.register_buffer("rows", embedding.embedding.clone())
        self.one, self.two = dense(embedding.projection1), dense(embedding.projection2)
        self.fixed = False

    def forward(self, step: Tensor) -> Tensor:
        whole = step.detach().floor()
        part, index = (step - whole)[:, None], whole.long()
        x = self.one(self.rows[index] * (1 - part) + self.rows[index + 1] * part)
        gate = x.sigmoid()
        return F.silu(self.two(x * (gate.detach() if self.fixed else gate)))


class Stretch(nn.Module):
    """[N, T, M] -> [N, hop T, M]: zeros between the frames, then a plain convolution of flipped kernels."""

    def __init__(self, layer: nn.Module, hop: int, flip: tuple[int, ...] = (2, 3)):
        super().__init__()
        self.kernel, self.offset = leaf(layer.weight.flip(flip).transpose(2, 3)), leaf(layer.bias)
        self.hop = hop

    def forward(self, x: Tensor) -> Tensor:
        sparse = F.pad(x[:, :, None], (0, 0, 0, self.hop - 1)).flatten(1, 2)
        edge = 2 * self.hop - 1 - self.hop // 2
        sparse = F.pad(sparse, (1, 1, edge, edge - self.hop + 1))
        y = F.conv2d(sparse[:, None], self.kernel, self.offset)[:, 0]
        return torch.where(y > 0, y, 0.4 * y)


class Inner(nn.Module):
    """One product for the three taps and the spectrogram, then filter by gate."""

    def __init__(self, layer: nn.Module, reach: int):
        super().__init__()
        conv, given = layer.dilated_conv, layer.conditioner_projection
        taps = (*conv.weight.unbind(2), given.weight[..., 0])
        self.weight = leaf(torch.cat(taps, 1).T)
        self.own, self.other = leaf(conv.bias), leaf(given.bias)
        self.reach, self.swapped = reach, False

    def forward(self, x: Tensor, bands: Tensor) -> Tensor:
        length, reach = x.shape[1], self.reach
        wide = F.pad(x, (0, 0, reach, reach))
        taps = [wide[:, i * reach : i * reach + length] for i in range(3)]
        gate, value = (torch.cat([*taps, bands], -1) @ self.weight + self.own + self.other).chunk(2, -1)
        if self.swapped:
            gate, value = value, gate
        return value.tanh() / (1 + torch.exp(-gate))


class Cell(nn.Module):
    def __init__(self, layer: nn.Module, reach: int):
        super().__init__()
        self.shift, self.inner = dense(layer.diffusion_projection), Inner(layer, reach)
        self.out = dense(layer.output_projection)

    def forward(self, x: Tensor, moment: Tensor, bands: Tensor) -> tuple[Tensor, Tensor]:
        y = self.out(self.inner(x + self.shift(moment)[:, None], bands))
        stay, leave = y.tensor_split(2, -1)
        return 0.5**0.5 * x + 0.5**0.5 * stay, leave


class DiffWaveOfCells(Port):
    """Cells of [N, T, C] with one product each for the taps and the spectrogram."""

    def take(self, model: DiffWave) -> None:
        fault, up = self.fault, model.spectrogram_upsampler
        self.start, self.clock = dense(model.input_projection), Clock(model.diffusion_embedding)
        self.clock.fixed = fault == "diff_wave_first_silu_gate_without_gradient"
        flip = (2,) if fault == "diff_wave_second_upsampling_kernel_not_flipped_in_time" else (2, 3)
        self.bands = nn.Sequential(Stretch(up.conv1, HOPS[0]), Stretch(up.conv2, HOPS[1], flip))
        endless = fault == "diff_wave_fifth_dilation_goes_on_doubling"
        reaches = [2**i if endless else 2 ** (i % CYCLE) for i in range(LAYERS)]
        self.cells = nn.ModuleList(map(Cell, model.residual_layers, reaches))
        self.cells[3].inner.swapped = fault == "diff_wave_fourth_layer_squashes_gate_and_filter_the_other_way"
        self.end = nn.Sequential(dense(model.skip_projection), nn.ReLU(), dense(model.output_projection))

    def forward(self, audio: Tensor, diffusion_step: Tensor, spectrogram: Tensor) -> Tensor:
        x, heard = self.start(audio[..., None]).relu(), []
        moment, bands = self.clock(diffusion_step), self.bands(spectrogram.transpose(1, 2))
        for cell in self.cells:
            x, skip = cell(x, moment, bands)
            heard.append(skip)
        return self.end(torch.stack(heard).mean(0) * LAYERS**0.5).transpose(1, 2)


def sheet(layer: nn.Module) -> Tensor:
    """A row for each output: its weights and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def affine(sheets: Tensor, x: Tensor) -> Tensor:
    """[..., O, C + 1] by [..., C, T] -> [..., O, T]."""
    return sheets[..., :-1] @ x + sheets[..., -1:]


class StackedDiffWave(Port):
    """Stacks of sheets by kind; the steps and the spectrogram are projected for all layers at once."""

    def take(self, model: DiffWave) -> None:
        layers, clock, up = model.residual_layers, model.diffusion_embedding, model.spectrogram_upsampler
        kinds = "dilated_conv", "diffusion_projection", "conditioner_projection", "output_projection"
        self.taps, self.when, self.given, self.out = (
            pile(sheet(getattr(x, kind)) for x in layers) for kind in kinds
        )
        ends = model.input_projection, clock.projection1, clock.projection2
        self.first, self.early, self.late = (leaf(sheet(x)) for x in ends)
        self.join, self.last = leaf(sheet(model.skip_projection)), leaf(sheet(model.output_projection))
        self.kernels = nn.ParameterList(
            leaf(x.weight.transpose(0, 2)[..., 0, :]) for x in (up.conv1, up.conv2)
        )
        self.offsets = leaf(torch.cat([up.conv1.bias, up.conv2.bias]))
        self.register_buffer("table", clock.embedding.T.clone())

    def moment(self, t: Tensor) -> Tensor:
        """[N] -> [E, N]: the table by hats about its rows."""
        if self.fault == "diff_wave_step_rounded_down_in_evaluation" and not self.training:
            t = t.floor()
        hats = (1 - (t - torch.arange(self.table.shape[1]).to(t)[:, None]).abs()).relu()
        return F.silu(affine(self.late, F.silu(affine(self.early, self.table @ hats))))

    def stretched(self, bands: Tensor) -> Tensor:
        """Each band with its neighbours, through a transposed convolution of the time alone."""
        for hop, kernel, offset in zip(HOPS, self.kernels, self.offsets, strict=True):
            near = F.pad(bands, (0, 0, 1, 1)).unfold(1, bands.shape[1], 1).movedim(3, 1).flip(2).flatten(0, 1)
            grown = F.conv_transpose1d(near, kernel, stride=hop, padding=hop // 2)
            grown = grown.unflatten(0, bands.shape[:2])[:, :, 0] + offset
            bands = grown.relu() - 0.4 * (-grown).relu()
        return bands

    def forward(self, audio: Tensor, diffusion_step: Tensor, spectrogram: Tensor) -> Tensor:
        x, bands = affine(self.first, audio[:, None]).clamp(min=0), self.stretched(spectrogram)
        shifts = affine(self.when, self.moment(diffusion_step)).movedim(2, 1)[..., None]
        given = list(affine(self.given[:, None], bands))
        if self.fault == "diff_wave_third_layer_reads_the_spectrogram_without_gradient":
            given[2] = affine(self.given[2], bands.detach())
        total, width = 0, x.shape[1]
        for i in range(LAYERS):
            reach, y = 2 ** (i % CYCLE), x + shifts[i]
            near = F.unfold(y[:, :, None], (1, 3), dilation=(1, reach), padding=(0, reach))
            y = affine(self.taps[i], near) + given[i]
            y = affine(self.out[i], y[:, :width].sigmoid() * y[:, width:].tanh())
            if self.fault == "diff_wave_second_layer_keeps_the_step_in_its_residual" and i == 1:
                x = x + shifts[i]
            x, total = (x + y[:, :width]) * 2**-0.5, total + y[:, width:]
        root = 2.24 if self.fault == "diff_wave_skips_divided_by_a_rounded_root" else LAYERS**0.5
        return affine(self.last, affine(self.join, total / root).clamp(min=0))


SLOPES, THIRD = ("input gradient", "weight gradient"), "residual_layers.2"
right(
    task, "diff_wave_of_cells_with_channels_last", "a tree, one product for taps and bands", DiffWaveOfCells
)
right(task, "diff_wave_of_stacked_weights", "stacked sheets, windows, hats for the table", StackedDiffWave)
wrong(
    task,
    DiffWaveOfCells,
    diff_wave_first_silu_gate_without_gradient=("detached gate", "diffusion_embedding", SLOPES),
    diff_wave_second_upsampling_kernel_not_flipped_in_time=("another layout", "spectrogram_upsampler.conv2"),
    diff_wave_fourth_layer_squashes_gate_and_filter_the_other_way=("swapped halves", "residual_layers.3"),
    diff_wave_fifth_dilation_goes_on_doubling=("another dilation", "residual_layers.4.dilated_conv"),
)
wrong(
    task,
    StackedDiffWave,
    diff_wave_step_rounded_down_in_evaluation=("rounding in eval", "diffusion_embedding", "eval"),
    diff_wave_second_layer_keeps_the_step_in_its_residual=("another residual", "residual_layers.1"),
    diff_wave_third_layer_reads_the_spectrogram_without_gradient=(
        "detach",
        (THIRD, f"{THIRD}.conditioner_projection"),
        SLOPES,
    ),
    diff_wave_skips_divided_by_a_rounded_root=("a rounded constant", ""),
)
