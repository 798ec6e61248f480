"""Weights stored channels last: [N, C, H, W] in memory as [N, H, W, C]. The same numbers, other kernels."""

from __future__ import annotations

import torch
from torch import nn


def channels_last(model: nn.Module) -> nn.Module:
    """``model`` with its convolution weights stored channels last, in place.

    A convolution takes its format from its weight, so that activations and gradients follow ("Channels Last
    Memory Format in PyTorch", PyTorch tutorials).
    """
    return model.to(memory_format=torch.channels_last)
