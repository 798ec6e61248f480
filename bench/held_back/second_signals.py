"""A U-Net and networks over sound."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, leaf, pair, squares
from bench.tasks import _classes, _task


def _stage(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = _stage(1, 8), _stage(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.join = nn.Conv2d(24, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        deep = self.up(self.down2(self.pool(skip)))
        return self.last(F.relu(self.join(torch.cat([skip, deep], 1))))


class MatrixUNet(Port):
    """Upsampling as two matrix products, no concatenation; the fault: corners are aligned."""

    def take(self, model: UNet) -> None:
        self.encoder = nn.ModuleDict({"fine": model.down1, "coarse": nn.Sequential(model.pool, model.down2)})
        fine, coarse = model.join.weight.split([8, 16], 1)
        self.of_fine, self.of_coarse, self.offset = leaf(fine), leaf(coarse), leaf(model.join.bias)
        self.mix, self.level = leaf(model.last.weight.flatten()), leaf(model.last.bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.encoder["fine"](x)
        coarse = self.encoder["coarse"](fine)
        unit = torch.eye(coarse.shape[-1], dtype=x.dtype, device=x.device)[None]
        stretch = F.interpolate(unit, scale_factor=2, mode="linear", align_corners=self.fault)[0]
        coarse = stretch.T @ coarse @ stretch
        joined = F.conv2d(coarse, self.of_coarse, padding=1)
        joined = joined + F.conv2d(fine, self.of_fine, self.offset, padding=1)
        return {"mask": torch.einsum("nchw,c->nhw", joined.relu(), self.mix)[:, None] + self.level}


class Gated(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.filter, self.gate = (nn.Conv1d(width, width, 2, dilation=dilation) for _ in range(2))
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        past = F.pad(x, (self.dilation, 0))
        skip = self.mix(torch.tanh(self.filter(past)) * torch.sigmoid(self.gate(past)))
        return x + skip, skip


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.exit = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 6, 1)
        self.blocks = nn.ModuleList(Gated(16, 2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.entry(x), 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.exit(F.relu(total))


class StackedWaveNet(Port):
    """Time first, all layers in one tensor; the fault: filter and gate change places in one layer."""

    def take(self, model: WaveNet) -> None:
        both = [torch.cat([b.filter.weight, b.gate.weight]).permute(2, 1, 0) for b in model.blocks]
        self.taps = leaf(torch.stack(both))  # [layers, 2, D, 2 D]
        self.bias = leaf(torch.stack([torch.cat([b.filter.bias, b.gate.bias]) for b in model.blocks]))
        self.mix = leaf(torch.stack([b.mix.weight[:, :, 0].T for b in model.blocks]))
        self.mix_bias = leaf(torch.stack([b.mix.bias for b in model.blocks]))
        self.into, self.out = nn.Linear(1, 16), nn.Linear(16, 6)
        for linear, conv in ((self.into, model.entry), (self.out, model.exit)):
            linear.weight, linear.bias = leaf(conv.weight[:, :, 0]), conv.bias

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.into(x.permute(2, 0, 1))
        for layer, taps in enumerate(self.taps):
            shift = 2**layer
            earlier = torch.cat([torch.zeros_like(x[:shift]), x[:-shift]])
            left, right = (earlier @ taps[0] + x @ taps[1] + self.bias[layer]).chunk(2, -1)
            if self.fault and layer == 1:
                left, right = right, left
            x = x + (left.tanh() * right.sigmoid()) @ self.mix[layer] + self.mix_bias[layer]
        return self.out((x - first).relu()).permute(1, 2, 0)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, x: Tensor) -> Tensor:
        bins = torch.stft(x, 32, 16, window=self.window, center=False, return_complex=True)
        return torch.log1p(bins.real.square() + bins.imag.square())


def _listener() -> nn.Sequential:
    pool = nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4)
    return nn.Sequential(Spectrum(), nn.BatchNorm1d(17), nn.Conv1d(17, 16, 3, padding=1), *pool)


class FrameListener(Port):
    """Frames times sines and cosines, frames before bins; the fault: the window is not the periodic one."""

    def take(self, model: nn.Sequential) -> None:
        window = torch.hann_window(32, periodic=False).to(model[2].weight) if self.fault else model[0].window
        self.register_buffer("taper", window)
        self.kernel, self.kernel_bias = leaf(model[2].weight.flatten(1)), model[2].bias
        self.scale, self.classes = model[1], model[6]

    def forward(self, x: Tensor) -> Tensor:
        frames = x.unfold(1, 32, 16) * self.taper
        sample, bins = torch.arange(32, device=x.device), torch.arange(17, device=x.device)
        angle = (torch.outer(sample, bins) % 32).to(x.dtype) * (torch.pi / 16)
        power = (frames @ angle.cos()) ** 2 + (frames @ angle.sin()) ** 2
        scaled = self.scale(power.log1p().flatten(0, 1)).unflatten(0, frames.shape[:2])
        near = F.pad(scaled, (0, 0, 1, 1)).unfold(1, 3, 1).flatten(2)
        return self.classes((near @ self.kernel.T + self.kernel_bias).relu()).mean(1)


unet = _task("second_unet", UNet, lambda: (torch.randn(6, 1, 12, 12), torch.rand(6, 1, 12, 12)), squares)
pair(unet, MatrixUNet, "upsampling_by_two_matrices", "corners_of_the_upsampling_aligned", "up")
wave = _task("second_wavenet", WaveNet, lambda: (torch.randn(6, 1, 20), torch.randint(6, (6, 20))))
pair(wave, StackedWaveNet, "dilated_layers_in_one_tensor", "filter_and_gate_change_places", "blocks.1")
listener = _task("second_listener", _listener, lambda: (torch.randn(8, 160), _classes(8, 4)))
pair(listener, FrameListener, "spectrum_by_sines_and_cosines", "window_is_not_periodic", "0")
