"""True rewrites of a conv by another algorithm: im2col, shifts, FFT, Winograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, ConvWeights, rewritten
from bench.tasks import autoencoder, cnn, resnet, two_inputs


class Winograd(ConvWeights):
    """F(m x m, 3 x 3) after Lavin & Gray (CVPR 2016); sides are multiples of m, stride and padding are 1."""

    inputs: tuple
    kernels: tuple
    outputs: tuple

    def forward(self, x: Tensor) -> Tensor:
        b, g, a = (x.new_tensor(rows) for rows in (self.inputs, self.kernels, self.outputs))
        tiles = self.padded(x).unfold(2, len(b), len(a)).unfold(3, len(b), len(a))
        products = torch.einsum("ocij,ncyxij->noyxij", g @ self.weight @ g.T, b @ tiles @ b.T)
        y = a @ products @ a.T
        return self.with_bias(y.permute(0, 1, 2, 4, 3, 5).reshape(*y.shape[:2], *x.shape[2:]))


class WinogradF4(Winograd):
    inputs = (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    )
    kernels = (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    )
    outputs = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


@in_place_of("conv2", SAME, "conv by im2col", cnn, "conv_unfold_matmul")
class UnfoldMatmul(ConvWeights):
    """``F.unfold`` and one matrix product, for the strided conv."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel, padding=self.padding, stride=self.stride)
        side = (x.shape[2] + 2 * self.padding - self.kernel) // self.stride + 1
        return self.with_bias((self.weight.flatten(1) @ columns).unflatten(2, (side, -1)))


@in_place_of("conv", SAME, "conv by im2col", two_inputs, "conv1d_as_linear_on_windows")
class UnfoldLinear1d(nn.Module):
    """A linear layer on each window of the signal."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.kernel, self.padding = conv.kernel_size[0], conv.padding[0]
        self.linear = nn.Linear(conv.in_channels * self.kernel, conv.out_channels)
        self.linear.load_state_dict({"weight": conv.weight.flatten(1), "bias": conv.bias})

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (self.padding, self.padding)).unfold(2, self.kernel, 1)
        return self.linear(windows.transpose(1, 2).flatten(2)).transpose(1, 2)


@in_place_of("down1", SAME, "conv by einsum", autoencoder, "conv_einsum")
class WindowsEinsum(ConvWeights):
    """``einsum`` over a view of the windows, for the strided 4x4 conv."""

    def forward(self, x: Tensor) -> Tensor:
        windows = self.padded(x)
        for side in (2, 3):
            windows = windows.unfold(side, self.kernel, self.stride)
        return self.with_bias(torch.einsum("nchwij,ocij->nohw", windows, self.weight))


@in_place_of("layer1.1.conv2", SAME, "conv by shifts", resnet, "conv_shift_and_add")
class ShiftAndAdd(ConvWeights):
    """The sum over the nine kernel positions of shifted 1x1 convs."""

    def forward(self, x: Tensor) -> Tensor:
        x, (height, width) = self.padded(x), x.shape[2:]
        y = 0
        for i in range(self.kernel):
            for j in range(self.kernel):
                shifted = x[:, :, i : i + height, j : j + width]
                y = y + torch.einsum("nchw,oc->nohw", shifted, self.weight[:, :, i, j])
        return self.with_bias(y)


@in_place_of("layer3.0.shortcut.0", SAME, "1x1 conv as linear", resnet, "pointwise_conv_as_linear")
class PointwiseLinear(ConvWeights):
    """The strided 1x1 conv of a shortcut as a linear layer on every second pixel."""

    def forward(self, x: Tensor) -> Tensor:
        pixels = x[:, :, :: self.stride, :: self.stride].permute(0, 2, 3, 1)
        return F.linear(pixels, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


@in_place_of("conv1", "round_off", "conv by FFT", cnn, "conv_fft")
class FFTConv(ConvWeights):
    """A product in the frequency domain, padded so that nothing wraps around."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        size = (height + self.kernel - 1, width + self.kernel - 1)
        kernel = torch.fft.rfft2(self.weight.flip(2, 3), s=size)
        y = torch.fft.irfft2(torch.einsum("nchw,ochw->nohw", torch.fft.rfft2(x, s=size), kernel), s=size)
        first = self.kernel - 1 - self.padding
        return self.with_bias(y[:, :, first : first + height, first : first + width])


@in_place_of("conv", "round_off", "conv by FFT", two_inputs, "conv1d_fft")
class FFTConv1d(nn.Module):
    """The conjugate of the kernel's spectrum makes the correlation; what wraps around is cut off."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.weight, self.bias, self.padding = conv.weight, conv.bias, conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[2] + 2 * self.padding
        signal = torch.fft.rfft(F.pad(x, (self.padding, self.padding)))
        kernel = torch.fft.rfft(self.weight, n=length).conj()
        y = torch.fft.irfft(torch.einsum("ncf,ocf->nof", signal, kernel), n=length)
        return y[..., : length - self.weight.shape[2] + 1] + self.bias[:, None]


@in_place_of("layer1.0.conv1", "round_off", "conv by Winograd", resnet, "conv_winograd_f2")
class WinogradF2(Winograd):
    """F(2x2, 3x3)."""

    inputs = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
    kernels = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
    outputs = ((1, 1, 1, 0), (0, 1, -1, -1))


@case("round_off", "conv by Winograd", on=resnet)
def conv_winograd_f4(model: nn.Module) -> nn.Module:
    """F(4x4, 3x3), whose constants 1/6 and 1/24 no binary float holds."""
    return rewritten(model, "layer3.1.conv2", WinogradF4)


@case("round_off", "conv by Winograd", on=cnn)
def first_conv_winograd_f4(model: nn.Module) -> nn.Module:
    """F(4x4, 3x3) on the images themselves, with a bias."""
    return rewritten(model, "conv1", WinogradF4)
