"""Ports of a field of density and color along rays."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.case import case, in_place_of
from bench.held_back._fifth_rays import Field, Trunk, rays
from bench.held_back._fifth_vision import SAME, right
from bench.held_back._fourth_ports import Port, leaf, wrong


class Samples(Port):
    """The field of [S, C, N], whose sines come before all cosines; light is lost in logarithms."""

    def take(self, model: Field) -> None:
        waves = torch.arange(24).view(4, 2, 3).transpose(0, 1).flatten() + 3
        order = torch.cat([torch.arange(3), waves])
        layers = [leaf(layer.weight) for layer in model.trunk.layers]
        layers[0] = leaf(layers[0][:, order])
        again, inner = model.trunk.layers[2].weight.split([27, 32], 1)
        self.again = leaf(again[:, order])
        layers[2] = leaf(inner)
        self.layers = nn.ParameterList(layers)
        self.offsets = leaf(torch.stack([layer.bias for layer in model.trunk.layers]))
        self.heads = nn.ParameterDict()
        heads = {"d": model.to_density, "v": model.view, "c": model.color[0], "rgb": model.color[2]}
        for name, head in heads.items():
            self.heads[name] = leaf(torch.cat([head.weight, head.bias[:, None]], 1))
        self.register_buffer("depths", model.depths.clone())
        self.register_buffer("bands", model.encode.bands.clone())
        self.register_buffer("seen", model.encode.progress.clone())

    def head(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.heads[name][:, :-1], self.heads[name][:, -1:]
        return weight @ x + bias

    def waves(self, x: Tensor) -> Tensor:
        places = torch.arange(4)
        alpha = (self.seen / 4 + 1).clamp(max=3.0 if self.fault == "last_frequency_never_opens" else 4.0)
        open_ = torch.sin(math.pi / 2 * (alpha - places).clamp(0, 1)).square()[:, None, None]
        angles = torch.einsum("scn,k->skcn", x, self.bands)
        if self.training:
            self.seen.add_(1)
        return torch.cat([x, (open_ * angles.sin()).flatten(1, 2), (open_ * angles.cos()).flatten(1, 2)], 1)

    def trunk(self, x: Tensor) -> Tensor:
        h = x
        for index, (layer, offset) in enumerate(zip(self.layers, self.offsets, strict=True)):
            y = layer @ h + offset[:, None]
            h = (y + self.again @ x if index == 2 else y).relu()
        return h

    def render(self, density: Tensor, color: Tensor) -> dict[str, Tensor]:
        """Of [S, N] and [S, 3, N]."""
        lost = density * F.pad(self.depths.diff(), (0, 1), value=1e10)[:, None]
        through = F.pad(lost[:-1].cumsum(0), (0, 0, 1, 0))
        weights = (-through).exp() * -torch.expm1(-lost)
        depth = self.depths @ (weights.detach() if self.fault == "depth_holds_the_weights" else weights)
        near = weights[:-1]
        shown = torch.einsum("sn,scn->nc", near, color[:-1]) + (1 - near.sum(0))[:, None]
        return {"color": shown, "depth": depth}

    def forward(self, origins: Tensor, directions: Tensor) -> dict[str, Tensor]:
        length = directions.square().sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        ways = directions if self.fault == "ways_of_any_length_to_the_view" else directions / length
        steps = self.depths[:, None, None]
        h = self.trunk(self.waves(origins.T + steps * (directions / length).T))
        view = self.head("v", ways.T).expand(len(steps), -1, -1)
        color = self.head("rgb", self.head("c", torch.cat([h, view], 1)).relu()).sigmoid()
        return self.render(F.softplus(self.head("d", h)[:, 0] - 1), color)


right(rays, "samples_first_and_light_in_logarithms", "port to samples first", Samples)
wrong(
    rays,
    Samples,
    ways_of_any_length_to_the_view=("a norm missing", ""),
    depth_holds_the_weights=("a detach too many", "render", "input gradient"),
)


@case("bug", "a counter that stops", rays, module="encode", step=9)
def last_frequency_never_opens(model: Field) -> nn.Module:
    return Samples(model, "last_frequency_never_opens")


@in_place_of("trunk", SAME, "layers computed again", rays, name="trunk_computed_again")
class Again(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)
