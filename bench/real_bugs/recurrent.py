"""Recurrent cells: the order of gates, where biases go, and what is reset."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real_bugs import real_bug
from bench.tasks import recurrent


class Stepped(nn.LSTM):
    """One layer, batch first, stepped by hand; ``gates`` turns the four sums into i, f, g, o."""

    def gates(self, sums: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = sums.chunk(4, 1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def biases(self) -> Tensor:
        return self.bias_ih_l0 + self.bias_hh_l0

    def forward(self, x: Tensor, state=None):
        h = c = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for now in x.unbind(1):
            i, f, g, o = self.gates(now @ self.weight_ih_l0.T + h @ self.weight_hh_l0.T + self.biases())
            c = f * c + i * g
            h = o * c.tanh()
            states.append(h)
        return torch.stack(states, 1), (h[None], c[None])


@real_bug(
    "lstm_gates_share_a_bias",
    "https://github.com/ddbourgin/numpy-ml/issues/42",
    "numpy-ml before December 2019",
    at="lstm",
    on=recurrent,
)
class SharedBias(Stepped):
    """The forget and the update gate are given the output gate's bias."""

    def biases(self) -> Tensor:
        i, f, g, o = super().biases().chunk(4)
        return torch.cat([i, f, g, o] if self.mended else [o, o, g, o])


@real_bug(
    "lstm_gates_in_the_order_of_onnx",
    "https://github.com/CrispStrobe/CrispASR/pull/106",
    "CrispASR before May 2026 (pyannote's LSTM, ONNX's i, o, f, c against torch's i, f, g, o)",
    at="lstm",
    on=recurrent,
)
class OtherOrder(Stepped):
    """The weights lie in one library's order of gates and are read in the other's."""

    def gates(self, sums: Tensor) -> tuple[Tensor, ...]:
        first, second, third, fourth = sums.unflatten(1, (4, -1)).unbind(1)
        i, f, g, o = (first, second, third, fourth) if self.mended else (first, third, fourth, second)
        return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)


@real_bug(
    "forget_bias_behind_the_sigmoid",
    "https://github.com/apache/tvm/pull/3410",
    "TVM before June 2019 (TensorFlow frontend)",
    at="lstm",
    on=recurrent,
)
class BehindTheSigmoid(Stepped):
    """The forget bias, kept apart from the weights, is added to the gate instead of to its sum."""

    def gates(self, sums: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = sums.chunk(4, 1)
        stored = f - 0.5  # the weights of a cell whose forget bias is 0.5
        forget = (stored + 0.5).sigmoid() if self.mended else stored.sigmoid() + 0.5
        return i.sigmoid(), forget, g.tanh(), o.sigmoid()


@real_bug(
    "gru_resets_before_the_product",
    "https://github.com/onnx/keras-onnx/pull/33",
    "keras-onnx before March 2019 (reset_after exported as linear_before_reset=0)",
    at="cell",
    on=recurrent,
)
class ResetBefore(nn.GRUCell):
    """The state is reset before it is multiplied with the recurrent weights instead of after."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xr, xz, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        wr, wz, wn = self.weight_hh.chunk(3)
        br, bz, bn = self.bias_hh.chunk(3)
        r, z = (xr + F.linear(h, wr, br)).sigmoid(), (xz + F.linear(h, wz, bz)).sigmoid()
        n = torch.tanh(xn + (r * F.linear(h, wn, bn) if self.mended else F.linear(r * h, wn, bn)))
        return (1 - z) * n + z * h


@real_bug(
    "gru_gates_exchanged",
    "https://github.com/keras-team/keras/issues/8720",
    "keras 2.1 (CuDNNGRU weights converted)",
    at="cell",
    on=recurrent,
)
def exchanged(cell: nn.GRUCell, mended: bool) -> nn.Module:
    """The reset and the update gate's weights change places on the way between libraries."""
    return KerasGRUCell(cell, reordered=mended)


class KerasGRUCell(nn.Module):
    """Gates in the order z, r, n."""

    def __init__(self, cell: nn.GRUCell, reordered: bool):
        super().__init__()
        for name, weight in cell.named_parameters():
            r, z, n = weight.detach().chunk(3)
            self.register_parameter(name, nn.Parameter(torch.cat([z, r, n] if reordered else [r, z, n])))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xz, xr, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        hz, hr, hn = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, 1)
        z, r = (xz + hz).sigmoid(), (xr + hr).sigmoid()
        return torch.lerp(torch.tanh(xn + r * hn), h, z)
