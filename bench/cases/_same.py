"""Layers that compute what torch's own compute, in another order of operations, with the same parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HalvedLinear(nn.Linear):
    """The sum of the products over the two halves of the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        left = F.linear(x[..., :half], self.weight[:, :half])
        return left + F.linear(x[..., half:], self.weight[:, half:], self.bias)


class SummedLinear(nn.Linear):
    """Elementwise products, summed, and the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return self.bias + (x.unsqueeze(-2) * self.weight).sum(-1)


class UnfoldedConv2d(nn.Conv2d):
    """A conv without groups as one matrix product over the unfolded image."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (kh, kw), (sh, sw), (ph, pw) = self.kernel_size, self.stride, self.padding
        columns = F.unfold(x, (kh, kw), padding=(ph, pw), stride=(sh, sw))
        y = weight.flatten(1) @ columns
        height, width = (x.shape[2] + 2 * ph - kh) // sh + 1, (x.shape[3] + 2 * pw - kw) // sw + 1
        y = y.view(len(x), -1, height, width)
        return y if bias is None else y + bias[:, None, None]


class ChannelwiseConv2d(nn.Conv2d):
    """The sum of two convs, each over half of the input channels."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = self.in_channels // 2
        left = super()._conv_forward(x[:, :half], weight[:, :half], None)
        return left + super()._conv_forward(x[:, half:], weight[:, half:], bias)


class SteppedLSTM(nn.LSTM):
    """One layer, batch first, stepped by hand."""

    def forward(self, x: Tensor, state=None):
        h = c = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for t in range(x.shape[1]):
            joined, weight = torch.cat([x[:, t], h], 1), torch.cat([self.weight_ih_l0, self.weight_hh_l0], 1)
            i, f, g, o = F.linear(joined, weight, self.bias_ih_l0 + self.bias_hh_l0).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1), (h[None], c[None])


class WrittenGRUCell(nn.GRUCell):
    """The cell's equations as the manual has them."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xr, xz, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        hr, hz, hn = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, 1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        return n + z * (h - n)


class WrittenLayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension from its mean and variance."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight
            + self.bias
        )
