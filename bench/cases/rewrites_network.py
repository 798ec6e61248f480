"""True rewrites of a whole network: somebody else's implementation, with other names and structure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, copied
from bench.tasks import autoencoder, mlp, resnet


def _take_over(network: nn.Module, model: nn.Module) -> nn.Module:
    """``network`` with the weights of ``model``, which come in the same order under other names."""
    values = model.state_dict().values()
    network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))
    return network


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.branch(x))


def _flat_resnet(width: int) -> nn.Sequential:
    """ResNet18 as one flat Sequential."""
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        layers += [Residual(inputs, outputs, 1 if inputs == outputs else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(inputs, 10))


@case(SAME, "network written anew", on=resnet)
def resnet_as_flat_sequential(model: nn.Module) -> nn.Module:
    """ResNet18 by other classes, with numbers for names; the shortcut is added the other way round."""
    return _take_over(_flat_resnet(8), model)


@in_place_of("", SAME, "network written anew", mlp, "mlp_as_parameter_list")
class FunctionalMLP(nn.Module):
    """A functional MLP over an ``nn.ParameterList``. Weights and biases in turn in a list."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.theta = nn.ParameterList(copied(p) for p in model.parameters())

    def forward(self, x: Tensor) -> Tensor:
        *hidden, weight, bias = self.theta
        for w, b in zip(hidden[::2], hidden[1::2], strict=True):
            x = torch.relu(F.linear(x, w, b))
        return F.linear(x, weight, bias)


@case(SAME, "network written anew", on=mlp)
def mlp_as_sequential(model: nn.Module) -> nn.Module:
    """The same layers in a Sequential."""
    sizes = [(20, 48), (48, 32), (32, 5)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return _take_over(nn.Sequential(*layers[:-1]), model)


@in_place_of("", SAME, "all weights in one vector", mlp, "mlp_of_one_vector")
class FlatMLP(nn.Module):
    """One flat parameter holds all weights and biases, cut and shaped at each call."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.shapes = [p.shape for p in model.parameters()]
        self.theta = copied(nn.utils.parameters_to_vector(model.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.theta.split([shape.numel() for shape in self.shapes])
        w1, b1, w2, b2, w3, b3 = (p.view(shape) for p, shape in zip(pieces, self.shapes, strict=True))
        x = (x @ w1.T + b1).relu()
        x = (x @ w2.T + b2).relu()
        return x @ w3.T + b3


@in_place_of("", SAME, "network written anew", mlp, "mlp_on_columns")
class BatchLastMLP(nn.Module):
    """Features by examples: W x + b on columns, as in a textbook; biases are columns too."""

    def __init__(self, model: nn.Module):
        super().__init__()
        layers = (model.fc1, model.fc2, model.fc3)
        self.weights = nn.ParameterList(copied(layer.weight) for layer in layers)
        self.biases = nn.ParameterList(copied(layer.bias[:, None]) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        a = x.T
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            a = weight @ (a if i == 0 else torch.relu(a)) + bias
        return a.T


@in_place_of("", SAME, "network written anew", autoencoder, "autoencoder_functional")
class FunctionalAutoencoder(nn.Module):
    """No modules: parameters in an ``nn.ParameterDict`` and ``torch.nn.functional``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        names = {name: name.replace(".", "_") for name, _ in model.named_parameters()}
        self.p = nn.ParameterDict({names[name]: copied(p) for name, p in model.named_parameters()})

    def forward(self, x: Tensor) -> Tensor:
        p = self.p
        x = F.conv2d(x, p["down1_weight"], p["down1_bias"], stride=2, padding=1)
        x = F.silu(F.instance_norm(x, weight=p["norm1_weight"], bias=p["norm1_bias"]))
        x = F.silu(F.conv2d(x, p["down2_weight"], p["down2_bias"], stride=2, padding=1))
        x = F.silu(F.conv_transpose2d(x, p["up1_weight"], p["up1_bias"], stride=2, padding=1))
        return F.conv_transpose2d(x, p["up2_weight"], p["up2_bias"], stride=2, padding=1)


@case(SAME, "network written anew", on=autoencoder)
def autoencoder_as_two_halves(model: nn.Module) -> nn.Module:
    """An encoder and a decoder, each a Sequential of the same modules."""
    encoder = nn.Sequential(model.down1, model.norm1, model.act1, model.down2, model.act2)
    decoder = nn.Sequential(model.up1, model.act3, model.up2)
    return nn.Sequential(encoder, decoder)
