"""True rewrites of dilated, weight-normalised temporal convs with a shared layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_sequences import Temporal, TemporalBlock, temporal
from bench.cases._rewritten import SAME, copied, rewritten
from bench.surgery import recast

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def _blocks(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    for name in BLOCKS:
        recast(model, name, cls)
    return model


@case(SAME, "padding on one side", on=temporal)
def causal_padding_on_the_left(model: nn.Module) -> nn.Module:
    """Zeros are put before the signal alone, so nothing is cut off behind it."""

    class Block(TemporalBlock):
        def forward(self, x: Tensor) -> Tensor:
            padded = F.pad(x, (self.cut, 0))
            y = F.conv1d(padded, self.conv.weight, self.conv.bias, dilation=self.conv.dilation)
            return F.relu_(y).add(x)

    return _blocks(model, Block)


@case(SAME, "dilation by phases", on=temporal)
def dilated_conv_on_interleaved_phases(model: nn.Module) -> nn.Module:
    """Each phase of the time axis becomes a signal of its own, which a conv without dilation sees."""

    class Block(TemporalBlock):
        def forward(self, x: Tensor) -> Tensor:
            (step,) = self.conv.dilation
            n, channels, time = x.shape
            phases = F.pad(x, (self.cut, -time % step)).unflatten(2, (-1, step))
            phases = phases.permute(0, 3, 1, 2).flatten(0, 1)
            y = F.conv1d(phases, self.conv.weight, self.conv.bias)
            y = y.view(n, step, channels, -1).permute(0, 2, 3, 1).flatten(2)
            return x + F.relu(y[..., :time])

    return _blocks(model, Block)


@case(SAME, "dilation by a kernel with holes", on=temporal)
def dilated_kernel_filled_with_zeros(model: nn.Module) -> nn.Module:
    """The kernel is spread out with zeros between its taps and used without dilation."""

    class Block(TemporalBlock):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.conv.weight
            spread = weight.new_zeros(*weight.shape[:2], self.cut + 1)
            spread[..., :: self.conv.dilation[0]] = weight
            return x + F.conv1d(x, spread, self.conv.bias, padding=self.cut)[..., : x.shape[2]].relu()

    return _blocks(model, Block)


class _GainAndDirection(nn.Module):
    """A block with weight normalisation by hand: a gain for each output, a direction as [k, in, out]."""

    def __init__(self, block: TemporalBlock):
        super().__init__()
        parts = block.conv.parametrizations.weight
        self.gain = copied(parts.original0.flatten())
        self.direction = copied(parts.original1.permute(2, 1, 0))
        self.bias, self.dilation = copied(block.conv.bias), block.conv.dilation

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(self.direction, dim=(0, 1))
        weight = (self.direction * (self.gain / length)).permute(2, 1, 0)
        padded = F.pad(x, (2 * self.dilation[0], 0))
        return x + F.relu(F.conv1d(padded, weight, self.bias, dilation=self.dilation))


@case(SAME, "weight norm by hand", on=temporal)
def weight_norm_with_gains_of_its_own(model: nn.Module) -> nn.Module:
    """Gain and direction are plain weights under other names and in another order of axes."""
    for name in BLOCKS:
        rewritten(model, name, _GainAndDirection)
    return model


@in_place_of(
    "", SAME, "shared layer under three names", temporal, "temporal_network_with_time_before_channels"
)
class _TimeLast(nn.Module):
    """The network anew on [N, T, C]: taps by shifting, the shared 1x1 conv under three names."""

    def __init__(self, model: Temporal):
        super().__init__()
        self.inputs = copied(model.stem.weight[:, :, 0].T)
        self.inputs_bias = copied(model.stem.bias)
        self.convs = nn.ModuleList(block.conv for block in model.blocks)
        self.mix1 = self.mix2 = self.mix3 = model.mix
        self.outputs = copied(model.head.weight.flatten(1))
        self.outputs_bias = copied(model.head.bias)

    def taps(self, x: Tensor, conv: nn.Conv1d) -> Tensor:
        (step,), time = conv.dilation, x.shape[1]
        padded = F.pad(x, (0, 0, 2 * step, 0))
        windows = torch.cat([padded[:, k * step : k * step + time] for k in range(3)], 2)
        return windows @ conv.weight.permute(2, 1, 0).flatten(0, 1) + conv.bias

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT @ self.inputs + self.inputs_bias
        for conv, mix in zip(self.convs, (self.mix1, self.mix2, self.mix3), strict=True):
            x = torch.tanh(F.linear(x + F.relu(self.taps(x, conv)), mix.weight.squeeze(2), mix.bias))
        total, means = torch.zeros_like(x[:, 0]), []
        for t, state in enumerate(x.unbind(1), start=1):
            total = total + state
            means.append(total / t)
        return F.linear(torch.stack(means, 1), self.outputs, self.outputs_bias).mT


@method_of("", SAME, "mean of the past as a product", temporal)
def mean_of_the_past_by_a_triangle(self, x: Tensor) -> Tensor:
    """The sums of the past come from a product with a triangle of ones; the head is applied before them."""
    x = self.stem(x)
    for block in self.blocks:
        x = self.mix(block(x)).tanh_()
    time = x.shape[2]
    past = torch.ones(time, time).triu().to(x)
    summed = F.conv1d(x, self.head.weight) @ past
    return summed / past.sum(0) + self.head.bias[:, None]
