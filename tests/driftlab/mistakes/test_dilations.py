"""A convolution with another dilation: the value that the rewrite with it computes is among those tried."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.mistakes.dilations import dilated
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
X, KERNEL = torch.randn(2, 3, 40), torch.randn(5, 3, 3)
MAP, SQUARE = torch.randn(2, 3, 20, 24), torch.randn(5, 3, 3, 3)


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (
            Call(F.conv1d, (X, KERNEL, None, 1, 8, 4), {}),
            F.conv1d(X, KERNEL, padding=4, dilation=2)[..., :40],
        ),
        (
            Call(F.conv1d, (X, KERNEL, None, 1, 2, 1), {}),
            F.conv1d(X, KERNEL, padding=16, dilation=8)[..., :40],
        ),
        (Call(F.conv1d, (F.pad(X, (8, 0)), KERNEL), {"dilation": 4}), F.conv1d(F.pad(X, (2, 0)), KERNEL)),
        (Call(F.conv2d, (MAP, SQUARE, None, 2, 1), {}), F.conv2d(MAP, SQUARE, None, 2, 2, 2)),
        (
            Call(F.conv2d, (F.pad(MAP, (2, 2, 2, 2)), SQUARE, None, 1, 0, 2), {}),
            F.conv2d(MAP, SQUARE, padding=1),
        ),
    ],
    ids=["causal, cut", "causal, cut, wider", "causal, padded before", "strided", "padded before"],
)
def test_of_every_way_to_pad(call, other):
    made = [make()[..., : other.shape[-1]] for _, make in dilated(call, [])]
    assert any(m.shape == other.shape and torch.allclose(m, other, atol=1e-5) for m in made)


def test_the_size_stays():
    call = Call(F.conv1d, (X, KERNEL, None, 1, 8, 4), {})
    assert {make().shape for _, make in dilated(call, [])} == {call.run().shape}


def test_a_single_tap_has_no_dilation():
    assert not list(dilated(Call(F.conv2d, (MAP, SQUARE[..., :1, :1]), {}), []))


class Layer(nn.Module):
    """[N, C, T]; a causal convolution, and what steers it."""

    def __init__(self, rate):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 2, padding=rate, dilation=rate)
        self.steer = nn.Conv1d(3, 8, 1)

    def forward(self, x, c):
        value, gate = (self.conv(x)[..., : x.shape[2]] + self.steer(c)).chunk(2, 1)
        return x + value.tanh() * gate.sigmoid()


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, (1, 2, 4)))
        self.last = nn.Conv1d(4, 2, 1)

    def forward(self, x, c):
        for layer in self.layers:
            x = layer(x, c)
        return self.last(x)


class InOneProduct(FlatPort):
    """Time first; taps and what steers them side by side, so that nothing is left of the convolution."""

    def forward(self, x, c):
        x, c = x.movedim(1, 2), c.movedim(1, 2)
        for i, rate in enumerate((1, 2, 2 if self.fault else 4)):
            w, b, s, d = (
                getattr(self, f"layers_{i}_{n}")
                for n in ("conv_weight", "conv_bias", "steer_weight", "steer_bias")
            )
            earlier = F.pad(x, (0, 0, rate, 0))[:, :-rate]
            weight = torch.cat([w[..., 0], w[..., 1], s[..., 0]], 1)
            value, gate = (torch.cat([earlier, x, c], 2) @ weight.T + b + d).chunk(2, 2)
            x = x + value.tanh() * gate.sigmoid()
        return (x @ self.last_weight[..., 0].T + self.last_bias).movedim(2, 1)


def test_it_is_told_where_nothing_is_left_of_the_convolution():
    torch.manual_seed(0)
    net = Waves()
    batches = [((torch.randn(3, 4, 12), torch.randn(3, 3, 12)), torch.randn(3, 2, 12)) for _ in range(2)]
    right, wrong = (
        diagnose(net, InOneProduct(net, fault), batches, loss=F.mse_loss) for fault in ("", "two")
    )
    assert right.verdict != "bug"
    assert (wrong.verdict, wrong.where.module) == ("bug", "layers.2.conv")
    assert "a dilation of 2" in str(wrong)
