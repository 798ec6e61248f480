"""Whole networks on images written anew, rightly: other names, split and permuted weights, another layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._heldout_fault_parts import chosen, shuffled
from bench.cases._heldout_fault_vision import InvertedResidual, MobileNet, PreActBlock, PreActNet
from bench.cases._rewritten import linear_of


def _kernel(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone())


class SplitBlock(nn.Module):
    """A PreActBlock: inner channels permuted, conv1 in halves by outputs, conv2 by inputs."""

    def __init__(self, block: PreActBlock, seed: int):
        super().__init__()
        order = shuffled(block.conv1.out_channels, seed)
        self.stride = block.conv1.stride
        self.left, self.right = (_kernel(w) for w in block.conv1.weight[order].chunk(2))
        self.near, self.far = (_kernel(w) for w in self.second_order(block.conv2.weight, order).chunk(2, 1))
        self.outer, self.inner = block.norm1, chosen(block.norm2, order)
        self.bypass, self.amount = block.shortcut, block.gain

    def second_order(self, weight: Tensor, order: Tensor) -> Tensor:
        return weight[:, order]

    def bypassed(self, x: Tensor, active: Tensor) -> Tensor:
        return x if self.bypass is None else self.bypass(active)

    def second(self, x: Tensor) -> Tensor:
        near, far = x.chunk(2, 1)
        return F.conv2d(far, self.far, padding=1) + F.conv2d(near, self.near, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        active = self.outer(x).clamp(min=0)
        halves = [F.conv2d(active, w, None, self.stride, 1) for w in (self.left, self.right)]
        branch = self.second(self.inner(torch.cat(halves, 1)).clamp(min=0))
        return branch * self.amount + self.bypassed(x, active)


class SplitPreActNet(nn.Module):
    """PreActNet as one sequence of layers; ``blocks`` may name another class for a block."""

    def __init__(self, net: PreActNet, blocks: dict[int, type[SplitBlock]] | None = None):
        super().__init__()
        kinds = [(blocks or {}).get(i, SplitBlock) for i in range(len(net.stages))]
        made = [kind(stage, i) for i, (kind, stage) in enumerate(zip(kinds, net.stages, strict=True))]
        self.body = nn.Sequential(net.stem, *made, net.norm, nn.ReLU())
        self.classify = net.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.body(x).flatten(2).mean(-1))


class PixelNorm(nn.Module):
    """BatchNorm over all but the last dimension."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.one = nn.BatchNorm1d(norm.num_features)
        self.one.load_state_dict(norm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x.flatten(0, -2)).view_as(x)


class PixelBlock(nn.Module):
    """An InvertedResidual on [N, H, W, C]: 1x1 convs as linear layers, the depthwise conv by shifts."""

    def __init__(self, block: InvertedResidual):
        super().__init__()
        se = block.se
        self.widen, self.narrow = (linear_of(c.weight[:, :, 0, 0]) for c in (block.expand, block.project))
        self.squeeze, self.excite = (linear_of(c.weight[:, :, 0, 0], c.bias) for c in (se.reduce, se.expand))
        self.taps = nn.ParameterList(w.clone() for w in block.depthwise.weight[:, 0].flatten(1).T.detach())
        self.stride, self.residual = block.depthwise.stride[0], block.residual
        self.bn_a, self.bn_b, self.bn_c = (PixelNorm(n) for n in (block.norm1, block.norm2, block.norm3))

    def shifted(self, x: Tensor) -> list[Tensor]:
        padded, s = F.pad(x, (0, 0, 1, 1, 1, 1)), self.stride
        height, width = x.shape[1:3]
        return [padded[:, i : i + height : s, j : j + width : s] for i in range(3) for j in range(3)]

    def depthwise(self, x: Tensor) -> Tensor:
        return sum(tap * pixels for tap, pixels in zip(self.taps, self.shifted(x), strict=True))

    def gate(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(x)

    def attend(self, x: Tensor) -> Tensor:
        squeezed = F.relu(self.squeeze(x.flatten(1, 2).mean(1)))
        return x * self.gate(self.excite(squeezed))[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.bn_a(self.widen(x)))
        y = self.bn_c(self.narrow(self.attend(F.hardswish(self.bn_b(self.depthwise(y))))))
        return x + y if self.residual else y


class PixelMobileNet(nn.Module):
    """MobileNet (without stochastic depth) on channels-last tensors; ``blocks`` as above."""

    def __init__(self, net: MobileNet, blocks: dict[int, type[PixelBlock]] | None = None):
        super().__init__()
        self.patch, self.out = net.stem, net.fc
        kinds = [(blocks or {}).get(i, PixelBlock) for i in range(len(net.blocks))]
        self.layers = nn.ModuleList(kind(b) for kind, b in zip(kinds, net.blocks, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean((1, 2)))
