"""A right rewrite whose fold computes."""

import torch
from torch import nn


class Negative(nn.Conv2d):
    """A conv that holds its weight with the other sign: gradient and update have it too."""

    def forward(self, x):
        return self._conv_forward(x, -self.weight, self.bias)


def negative(model):
    model.conv1.__class__ = Negative
    with torch.no_grad():
        model.conv1.weight.neg_()
    model.fold = lambda tensors: {n: -t if n == "conv1.weight" else t for n, t in tensors.items()}
    return model
