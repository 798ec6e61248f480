"""A right rewrite whose fold computes."""

import torch
from torch import nn


class Shifted(nn.Conv2d):
    """A conv whose weight is a sum, of which one part stays zero."""

    def forward(self, x):
        return self._conv_forward(x, self.weight + self.shift, self.bias)


def shifted(model):
    model.conv1.__class__ = Shifted
    model.conv1.register_buffer("shift", torch.zeros_like(model.conv1.weight))
    model.fold = folded
    return model


def folded(tensors):
    weight, shift = "conv1.weight", "conv1.shift"
    others = {name: tensor for name, tensor in tensors.items() if name != shift}
    return others | ({weight: tensors[weight] + tensors[shift]} if shift in tensors else {})
