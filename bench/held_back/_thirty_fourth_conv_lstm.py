"""A small ConvLSTM encoder and forecaster: two cells a side; states handed over in reverse."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

CHANNELS, HIGH, WIDE = 1, 16, 20
SEEN, AHEAD, VIDEOS = 4, 3, 3
THRESHOLDS, BALANCING_WEIGHTS = (0.2, 0.5), (1.0, 2.0, 5.0)
SLOPE = 0.2


def make_layers(block: dict[str, tuple[int, ...]]) -> nn.Sequential:
    """Layers by their names, which say what they are and whether a leaky ReLU follows."""
    layers = []
    for name, (channels, filters, kernel, stride, padding) in block.items():
        kind = nn.ConvTranspose2d if "deconv" in name else nn.Conv2d
        layers.append((name, kind(channels, filters, kernel, stride, padding)))
        if "leaky" in name:
            layers.append(("leaky_" + name, nn.LeakyReLU(SLOPE)))
    return nn.Sequential(OrderedDict(layers))


class ConvLSTM(nn.Module):
    """A convolutional LSTM with a peephole map a gate, over [S, N, C, H, W] or fed with zeros."""

    def __init__(self, input_channel: int, num_filter: int, height: int, width: int, num_groups: int = 0):
        super().__init__()
        self._input_channel, self._num_filter = input_channel, num_filter
        self._state_height, self._state_width = height, width
        self._conv = nn.Conv2d(input_channel + num_filter, 4 * num_filter, 3, padding=1)
        self._norm = nn.GroupNorm(num_groups, 4 * num_filter) if num_groups else nn.Identity()
        if num_groups:
            nn.init.normal_(self._norm.weight, 1.0, 0.2)
            nn.init.normal_(self._norm.bias, 0.0, 0.2)
        self.Wci = nn.Parameter(0.4 * torch.randn(1, num_filter, height, width))
        self.Wcf = nn.Parameter(0.4 * torch.randn(1, num_filter, height, width))
        self.Wco = nn.Parameter(0.4 * torch.randn(1, num_filter, height, width))

    def forward(
        self, inputs: Tensor | None, states: tuple[Tensor, Tensor] | None, seq_len: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if states is None:
            shape = inputs.shape[1], self._num_filter, self._state_height, self._state_width
            states = inputs.new_zeros(shape), inputs.new_zeros(shape)
        (h, c), outputs = states, []
        for index in range(seq_len):
            if inputs is None:
                x = h.new_zeros(h.shape[0], self._input_channel, self._state_height, self._state_width)
            else:
                x = inputs[index]
            conv_x = self._norm(self._conv(torch.cat([x, h], dim=1)))
            i, f, tmp_c, o = torch.chunk(conv_x, 4, dim=1)
            i = torch.sigmoid(i + self.Wci * c)
            f = torch.sigmoid(f + self.Wcf * c)
            c = f * c + i * torch.tanh(tmp_c)
            o = torch.sigmoid(o + self.Wco * c)
            h = o * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


def by_frame(subnet: nn.Module, input: Tensor) -> Tensor:
    """The subnet on each frame of [S, N, C, H, W]."""
    return subnet(input.flatten(0, 1)).unflatten(0, input.shape[:2])


class Encoder(nn.Module):
    def __init__(self, subnets: list[dict], rnns: list[ConvLSTM]):
        super().__init__()
        self.blocks = len(subnets)
        for index, (params, rnn) in enumerate(zip(subnets, rnns, strict=True), 1):
            setattr(self, f"stage{index}", make_layers(params))
            setattr(self, f"rnn{index}", rnn)

    def forward(self, input: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        hidden_states = []
        for i in range(1, self.blocks + 1):
            input = by_frame(getattr(self, f"stage{i}"), input)
            input, state = getattr(self, f"rnn{i}")(input, None, len(input))
            hidden_states.append(state)
        return tuple(hidden_states)


class Forecaster(nn.Module):
    def __init__(self, subnets: list[dict], rnns: list[ConvLSTM]):
        super().__init__()
        self.blocks = len(subnets)
        for index, (params, rnn) in enumerate(zip(subnets, rnns, strict=True)):
            setattr(self, f"rnn{self.blocks - index}", rnn)
            setattr(self, f"stage{self.blocks - index}", make_layers(params))

    def forward(self, hidden_states: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
        input = None
        for i in range(self.blocks, 0, -1):
            input, _ = getattr(self, f"rnn{i}")(input, hidden_states[i - 1], AHEAD)
            input = by_frame(getattr(self, f"stage{i}"), input)
        return input


class EF(nn.Module):
    """Frames [N, S, C, H, W] -> the frames that follow them."""

    def __init__(self):
        super().__init__()
        half, quarter = (HIGH // 2, WIDE // 2), (HIGH // 4, WIDE // 4)
        down = [{"conv1_leaky_1": (CHANNELS, 6, 3, 2, 1)}, {"conv2_leaky_1": (7, 9, 3, 2, 1)}]
        self.encoder = Encoder(down, [ConvLSTM(6, 7, *half), ConvLSTM(9, 10, *quarter, num_groups=8)])
        last = {"deconv2_leaky_1": (7, 5, 4, 2, 1), "conv3_leaky_2": (5, 4, 3, 1, 1)}
        up = [{"deconv1_leaky_1": (10, 8, 4, 2, 1)}, last | {"conv3_3": (4, CHANNELS, 1, 1, 0)}]
        self.forecaster = Forecaster(up, [ConvLSTM(11, 10, *quarter, num_groups=8), ConvLSTM(8, 7, *half)])
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                taps = layer.weight[0].numel() / (4 if layer.stride == (2, 2) else 1)
                nn.init.normal_(layer.weight, 0.0, (1.5 / taps) ** 0.5)
                nn.init.normal_(layer.bias, 0.0, 0.2)

    def forward(self, input: Tensor) -> Tensor:
        state = self.encoder(input.transpose(0, 1))
        return self.forecaster(state).transpose(0, 1)


def showers() -> tuple[Tensor, Tensor]:
    """Two showers that drift over the border and come back; the target is -1 where no radar looks."""
    time = torch.arange(SEEN + AHEAD)[:, None, None]
    shape = VIDEOS, 2, 1, 1, 1
    down = (torch.arange(HIGH)[:, None] - HIGH * torch.rand(shape) - 2 * torch.randn(shape) * time) / HIGH
    across = (torch.arange(WIDE) - WIDE * torch.rand(shape) - 2 * torch.randn(shape) * time) / WIDE
    near = (torch.cos(2 * torch.pi * down) + torch.cos(2 * torch.pi * across) - 2) * (1 + torch.rand(shape))
    frames = (near.exp() * (0.5 + 0.5 * torch.rand(shape))).sum(1).clamp(max=1)[:, :, None]
    frames = (frames + 0.02 * torch.randn_like(frames)).clamp(0, 1)
    target = frames[:, SEEN:].clone()
    target[..., :2, :3] = -1
    return frames[:, :SEEN], target


def weighted_mse_mae(output: Tensor, target: Tensor) -> Tensor:
    """The squared and the absolute error where the radar looks; heavy rain and late frames count more."""
    weights = torch.full_like(target, BALANCING_WEIGHTS[0])
    for i, threshold in enumerate(THRESHOLDS):
        step = BALANCING_WEIGHTS[i + 1] - BALANCING_WEIGHTS[i]
        weights = weights + step * (target >= threshold)
    late = torch.arange(1, AHEAD + 1).to(target)[:, None, None, None] / AHEAD
    weights, error = weights * late * (target >= 0), output - target
    return (weights * (error**2 + error.abs())).mean()
