"""True rewrites of a normalising flow, of a regression with two outputs and of a codebook."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import own_backward
from bench.case import case, in_place_of, method_of
from bench.cases._heldout_tables import Codebook, Coupling, Flow, Regression, codebook, flow, regression
from bench.cases._rewritten import SAME, copied, linear_of

adam = partial(torch.optim.Adam, lr=1e-2)


class _TwoHeads(nn.Module):
    """A coupling step whose scale and shift come from layers of their own; the determinant by LU."""

    def __init__(self, step: Coupling):
        super().__init__()
        self.rotate = copied(step.mix.T)
        self.hidden = step.net[0]
        last = step.net[2]
        (w_scale, w_shift), (b_scale, b_shift) = last.weight.chunk(2), last.bias.chunk(2)
        self.scale, self.shift = linear_of(w_scale, b_scale), linear_of(w_shift, b_shift)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        factors, _ = torch.linalg.lu_factor(self.rotate)
        kept, moved = (x @ self.rotate).tensor_split(2, dim=1)
        hidden = torch.tanh(self.hidden(kept))
        scale = torch.tanh(self.scale(hidden))
        moved = torch.addcmul(self.shift(hidden), moved, torch.exp(scale))
        return torch.cat([kept, moved], 1), scale.sum(1) + factors.diagonal().abs().log().sum()


@case(SAME, "determinant by LU", on=flow)
def flow_with_two_heads_and_lu(model: nn.Module) -> nn.Module:
    """Every step in other layers: the mixing matrix transposed, its determinant as a product of pivots."""
    model.steps = nn.ModuleList(_TwoHeads(step) for step in model.steps)
    return model


@in_place_of("", SAME, "halves in the other order", flow, "flow_with_its_halves_swapped", optimizer=adam)
class _Swapped(nn.Module):
    """The moved half comes first: the mixing matrices are permuted, their determinants taken in one batch."""

    def __init__(self, model: Flow):
        super().__init__()
        turn = torch.tensor([3, 4, 5, 0, 1, 2])
        mixes = [step.mix for step in model.steps]
        self.mixes = nn.ParameterList([copied(mixes[0][turn]), copied(mixes[1][turn][:, turn])])
        self.mixes.append(copied(mixes[2][turn][:, turn]))
        self.nets = nn.ModuleList(step.net for step in model.steps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volumes = [torch.linalg.slogdet(torch.stack(list(self.mixes))).logabsdet.sum().expand(len(x))]
        for mix, net in zip(self.mixes, self.nets, strict=True):
            x = F.linear(x, mix)
            scale, shift = net(x[:, 3:]).split(3, dim=1)
            scale = scale.tanh()
            x = torch.cat([scale.exp() * x[:, :3] + shift, x[:, 3:]], 1)
            volumes.append(scale.sum(1))
        return x.roll(3, 1), torch.stack(volumes).sum(0)


@method_of("", SAME, "standardisation folded into the weight", regression)
def standardisation_in_the_first_layer(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and spread scale the first layer's weight and move its bias, anew at each call."""
    weight = self.fc1.weight / self.spread
    x = self.act1(F.linear(x, weight, self.fc1.bias - weight @ self.center))
    x = self.act2(self.fc2(x))
    heads = torch.cat([self.mean.weight, self.log_variance.weight])
    both = F.linear(x, heads, torch.cat([self.mean.bias, self.log_variance.bias]))
    return tuple(both.chunk(2, 1))


@in_place_of("", SAME, "heads fused", regression, "two_outputs_of_one_matrix", optimizer=adam)
class _OneHead(nn.Module):
    """The network on columns; both outputs interleaved in one weight, PReLU's slopes in one parameter."""

    def __init__(self, model: Regression):
        super().__init__()
        self.register_buffer("shift", model.center.clone()[:, None])
        self.register_buffer("scale", model.spread.clone()[:, None])
        self.w1, self.w2 = copied(model.fc1.weight), copied(model.fc2.weight)
        self.b1, self.b2 = copied(model.fc1.bias[:, None]), copied(model.fc2.bias[:, None])
        self.slopes = copied(torch.cat([model.act1.weight, model.act2.weight]))
        heads = [model.mean, model.log_variance]
        self.head = copied(torch.stack([head.weight for head in heads], 1).flatten(0, 1))
        self.head_bias = copied(torch.stack([head.bias for head in heads], 1).view(-1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = (x.T - self.shift) / self.scale
        for weight, bias, slope in ((self.w1, self.b1, self.slopes[0]), (self.w2, self.b2, self.slopes[1])):
            y = weight @ columns + bias
            columns = torch.where(y > 0, y, slope * y)
        both = self.head @ columns + self.head_bias
        return both[::2].T, both[1::2].T


@in_place_of(
    "", SAME, "straight-through gradient by a function", codebook, "codes_with_a_straight_through_function"
)
class CodesWithAStraightThroughFunction(Codebook):
    """The nearest code from expanded squares, looked up by a one-hot product; the gradient by a function."""

    def nearest(self, z: Tensor) -> Tensor:
        codes = self.codes.weight
        return (codes.square().sum(1) - 2 * z @ codes.T).argmin(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        code = F.one_hot(self.nearest(z), 8).to(z) @ self.codes.weight
        penalty = (code - z.detach()).square().mean() + (z - code.detach()).square().mean() / 4
        through = own_backward(lambda z, code: code.clone(), lambda grad, z, code: (grad, None))
        return {"image": self.decode(through(z, code)), "penalty": penalty}
