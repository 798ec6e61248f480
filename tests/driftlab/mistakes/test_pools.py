"""Poolings by another statistic, or with a border that counts otherwise, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.dilations import turned_kernel
from driftlab.mistakes.pools import pooled_otherwise
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
X = torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(0))


def made(function, *args, **kwargs):
    return {words: make() for words, make in pooled_otherwise(Call(function, args, kwargs), [])}


def test_windows():
    found = made(F.max_pool2d, X, 3, stride=2, padding=1, ceil_mode=True)
    assert torch.equal(found["the mean, not the maximum, by `max_pool2d`"], F.avg_pool2d(X, 3, 2, 1, True))
    without = F.avg_pool2d(X, 3, 2, 1, True, count_include_pad=False)
    assert torch.equal(found["the mean, not the maximum, by `max_pool2d` without the border"], without)
    found = made(F.avg_pool2d, X, 3, 2, 1, True, False)
    assert torch.equal(found["the maximum, not the mean, by `avg_pool2d`"], F.max_pool2d(X, 3, 2, 1, 1, True))
    assert torch.equal(found["a border that `avg_pool2d` counts"], F.avg_pool2d(X, 3, 2, 1, True))
    assert not any("mean" in words for words in made(F.max_pool2d, X, 2, dilation=2))


def test_a_last_window_that_is_left_out_or_not():
    beyond = "a last window of `{}` that reaches beyond the border"
    found = made(F.avg_pool2d, X, 2, 2, 1, False, False)[beyond.format("avg_pool2d")]
    assert torch.equal(found, F.avg_pool2d(X, 2, 2, 1, True, False))
    found = made(F.max_pool2d, X, 2, dilation=2)[beyond.format("max_pool2d")]
    assert torch.equal(found, F.max_pool2d(X, 2, dilation=2, ceil_mode=True))
    within = beyond.replace("reaches", "reaches not").format("max_pool2d")
    found = made(F.max_pool2d, X, 3, stride=2, ceil_mode=True)[within]
    assert torch.equal(found, F.max_pool2d(X, 3, stride=2))


def test_a_whole_and_dimensions():
    (whole,) = made(F.adaptive_max_pool2d, X, (2, 3)).values()
    assert torch.equal(whole, F.adaptive_avg_pool2d(X, (2, 3)))
    (most,) = made(torch.mean, X, (2, 3), keepdim=True).values()
    assert torch.equal(most, X.amax((2, 3), keepdim=True))
    assert not made(F.relu, X)


def test_a_kernel_of_a_row_runs_down_with_its_border():
    weight, bias = torch.randn(6, 2, 1, 5), torch.randn(6)
    call = Call(F.conv2d, (X, weight, bias), {"padding": (0, 2), "stride": (1, 2), "groups": 2})
    ((_, make),) = turned_kernel(call, [])
    wanted = F.conv2d(X, weight.transpose(2, 3), bias, padding=(2, 0), stride=(2, 1), groups=2)
    torch.testing.assert_close(make(), wanted)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.row, self.pool = nn.Conv2d(2, 4, (1, 3), padding=(0, 1)), nn.MaxPool2d(2)
        self.inner, self.head = nn.Conv2d(4, 5, 1), nn.Linear(5, 3)

    def forward(self, x):
        y = self.pool(self.row(x).tanh())
        z = self.pool(self.inner(y).tanh())
        return self.head(z.mean((2, 3)))


class Flat(FlatPort):
    """Channels last; ``fault`` is one of the poolings, both calls of a layer, or the kernel."""

    def pooled(self, x):
        windows = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        return windows.mean((2, 4)) if self.fault == "pool" else windows.amax((2, 4))

    def forward(self, x):
        x, dim = x.movedim(1, 3), 1 if self.fault == "row" else 2
        ends = (0, 0, 1, 1) if dim == 2 else (0, 0, 0, 0, 1, 1)
        windows, size = F.pad(x, ends), x.shape[dim]
        taps = (windows.narrow(dim, i, size) @ self.row_weight[:, :, 0, i].T for i in range(3))
        x = self.pooled((sum(taps) + self.row_bias).tanh())
        x = self.pooled((x @ self.inner_weight[..., 0, 0].T + self.inner_bias).tanh())
        return self.linear("head", x.amax((1, 2)) if self.fault == "whole" else x.mean((1, 2)))


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("pool", "pool", "the mean, not the maximum, by `max_pool2d`"),
        ("row", "row", "a kernel with rows and columns exchanged"),
        ("whole", "", "the maximum, not the mean, by `mean`"),
    ],
)
def test_the_layer_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 2, 8, 12), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert any(words in e.details for e in found.evidence)
