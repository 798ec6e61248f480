"""Candidates that compute the same but whose weights are not updated as the reference's are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bench.case import case, in_place_of
from bench.cases._bug_parts import Halves, adopt
from bench.optimizers import UNSEEN, sgd
from bench.surgery import replace
from bench.tasks import _task, autoencoder, cnn, mlp, resnet, transformer, two_inputs


def without(part: str, start: bool = False) -> Callable:
    """A candidate's optimizer that lacks what has ``part`` in its name, or at the ``start`` of it."""
    here = str.startswith if start else str.__contains__
    return lambda model: sgd()([p for name, p in model.named_parameters() if not here(name, part)])


@in_place_of("fc2", "bug", "parameters not registered", mlp, "parameters_in_a_plain_list", passes=UNSEEN)
class Unregistered(nn.Module):
    """A split linear layer that keeps its parts in plain lists, which PyTorch does not see."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weights = [nn.Parameter(w.clone()) for w in linear.weight.detach().chunk(2)]
        self.biases = [nn.Parameter(b.clone()) for b in linear.bias.detach().chunk(2)]

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.weights, self.biases, strict=True)
        return torch.cat([F.linear(x, w.to(x), b.to(x)) for w, b in parts], -1)


@in_place_of(
    "down2", "bug", "parameters not registered", autoencoder, "weight_registered_as_buffer", passes=UNSEEN
)
class WeightAsBuffer(nn.Module):
    """The weight is a buffer; only the bias learns."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.stride, self.padding, self.bias = conv.stride, conv.padding, conv.bias
        self.register_buffer("weight", conv.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


@case("bug", "frozen", resnet, module="layer2.1.conv1", passes=UNSEEN)
def half_of_a_conv_frozen(model):
    """The second half was made with requires_grad=False."""
    halves = Halves(model.layer2[1].conv1)
    halves.second.requires_grad_(False)
    return replace(model, "layer2.1.conv1", halves)


@case("bug", "frozen", two_inputs, module="table", passes=UNSEEN)
def bias_of_a_linear_frozen(model):
    """The bias does not learn."""
    model.table.bias.requires_grad_(False)
    return model


HALF, NORM = without("conv2.second"), without("norm.", start=True)


@in_place_of("conv2", "bug", "missing from the optimizer", cnn, passes="update", candidate_optimizer=HALF)
def half_of_a_conv_not_in_the_optimizer(conv):
    """The list of what to train was written before the split and names the first half only."""
    return Halves(conv)


@in_place_of(
    "norm", "bug", "missing from the optimizer", transformer, passes="update", candidate_optimizer=NORM
)
def new_norm_not_in_the_optimizer(norm):
    """The last norm was replaced after the optimizer had taken its parameters."""
    return adopt(nn.LayerNorm(24), norm)


@case("bug", "untied", transformer, module=("head", "embed"), passes=UNSEEN)
def head_untied_from_the_embedding(model):
    """The new head has a copy of the embedding's weight."""
    head = nn.Linear(24, 29, bias=False)
    return replace(model, "head", adopt(head, model.head))


class Pair(nn.Module):
    """[N, 2, 9] -> [N, 3]: one encoder for both rows, and a linear layer on their features."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(9, 8)
        self.twin = self.encode
        self.act = nn.ReLU()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(torch.cat([self.encode(x[:, 0]), self.twin(x[:, 1])], 1)))


pair = _task("pair", Pair, lambda: (torch.randn(14, 2, 9), torch.randint(3, (14,))))


@case("bug", "untied", pair, module=("encode", "twin"), passes=UNSEEN)
def shared_encoder_no_longer_shared(model):
    """Each of the two rows gets an encoder of its own."""
    model.twin = adopt(nn.Linear(9, 8), model.encode)
    return model


@case("bug", "reparametrised", mlp, module="fc2", passes=("forward", *UNSEEN))
def weight_normalised(model):
    """The weight is stored as direction and (rounded) length: the same function, but another descent."""
    parametrizations.weight_norm(model.fc2)
    return model


class Doubled(nn.Module):
    def forward(self, stored: Tensor) -> Tensor:
        return stored / 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return 2 * weight


@case("bug", "reparametrised", cnn, module="conv2", passes=UNSEEN)
def weight_stored_doubled(model):
    """The weight is stored times two and halved when used, so that it learns at a quarter of the rate."""
    parametrize.register_parametrization(model.conv2, "weight", Doubled())
    return model


class GainAroundOne(nn.LayerNorm):
    """A LayerNorm that stores its gain less one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


@case(
    "bug",
    "reparametrised",
    transformer,
    module="blocks.0.norm1",
    passes="update",
    optimizer=sgd(weight_decay=5e-4),
)
def gain_stored_less_one(model):
    """Weight decay pulls the gain to one, not to zero."""
    norm = GainAroundOne(24)
    nn.init.zeros_(norm.weight)
    return replace(model, "blocks.0.norm1", norm)
