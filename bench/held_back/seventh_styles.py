"""Ports of a generator with styles: windows as matrices, scaled before and behind."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventh_styles import CHANNELS, WIDTH, Styles, discs
from bench.held_back._sixth_ports import few

styles = few("seventh_styles", Styles, discs, F.mse_loss)


def doubled(size: int) -> Tensor:
    """The matrix [2 size, size] that enlarges a line, its ends repeated."""
    rows = torch.zeros(2 * size, size, dtype=torch.float64)
    for i in range(size):
        for row, other in ((2 * i, max(i - 1, 0)), (2 * i + 1, min(i + 1, size - 1))):
            rows[row, i] += 0.75
            rows[row, other] += 0.25
    return rows


class ScaledOnBothSides(Port):
    """Channels last, windows as matrices; what goes in is scaled by the style, what comes out by its norm."""

    def take(self, model: Styles) -> None:
        mapping = model.mapping
        self.map, self.map_b = pile(x.weight.T for x in mapping.layers), pile(x.bias for x in mapping.layers)
        self.register_buffer("usual", mapping.mean.clone())
        self.first = leaf(model.first.movedim(0, 2))
        convs = [layer.conv for layer in model.layers] + [layer.conv for layer in model.colours]
        self.ask = leaf(torch.cat([conv.style.weight for conv in convs]).T)
        self.ask_b = leaf(torch.cat([conv.style.bias for conv in convs]))
        self.conv = pile(layer.conv.weight.flatten(2).permute(1, 2, 0) for layer in model.layers)
        self.colour = pile(layer.conv.weight[..., 0, 0].T for layer in model.colours)
        self.colour_b = pile(layer.bias for layer in model.colours)
        self.shift = pile(layer.bias for layer in model.layers)
        self.strength = pile(layer.strength for layer in model.layers)
        for i, layer in enumerate(model.layers):
            self.register_buffer(f"grain{i}", layer.noise[..., None].clone())
        self.register_buffer("twice", doubled(4).to(self.map))

    def styles(self, z: Tensor) -> Tensor:
        w = z / (z.pow(2).sum(1, keepdim=True) / WIDTH + 1e-8).sqrt()
        for weight, bias in zip(self.map, self.map_b, strict=True):
            h = w @ weight / WIDTH**0.5 + bias
            w = torch.maximum(h, 0.2 * h) * 2**0.5
        if self.training:
            rate = 0.01 if self.fault == "mean_style_follows_too_slowly" else 0.1
            with torch.no_grad():
                self.usual.mul_(1 - rate).add_(rate * w.mean(0))
            return w
        if self.fault == "styles_shrink_towards_nothing_in_eval":
            return 0.7 * w
        return 0.7 * w + 0.3 * self.usual

    def layer(self, i: int, x: Tensor, style: Tensor) -> Tensor:
        """[N, H, W, C] by the style [N, C]."""
        weight = self.conv[i] / (9 * CHANNELS) ** 0.5
        squares = weight.square().sum(1)
        if self.fault == "one_norm_without_the_style" and i == 1:
            style_squares = torch.ones_like(style)
        else:
            style_squares = style.square()
        size = (style_squares @ squares + 1e-8).rsqrt()
        if self.fault == "first_norm_held" and i == 0:
            size = size.detach()
        windows = F.pad(x * style[:, None, None], (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        y = torch.einsum("nhwck,cko->nhwo", windows.flatten(4), weight) * size[:, None, None]
        grain = self.strength[i] * self.get_buffer(f"grain{i}")
        if self.fault == "last_grain_after_the_activation" and i == 2:
            return F.leaky_relu(y + self.shift[i], 0.2) * 2**0.5 + grain
        y = y + self.shift[i] + grain
        return torch.maximum(y, 0.2 * y) * 2**0.5

    def coloured(self, i: int, x: Tensor, style: Tensor) -> Tensor:
        return (x * style[:, None, None]) @ (self.colour[i] / CHANNELS**0.5) + self.colour_b[i]

    def larger(self, x: Tensor) -> Tensor:
        return torch.einsum("ih,jw,nhwc->nijc", self.twice, self.twice, x)

    def forward(self, z: Tensor) -> Tensor:
        asked = (self.styles(z) @ (self.ask / WIDTH**0.5) + self.ask_b).unflatten(1, (5, CHANNELS))
        a, b, c, first, last = asked.unbind(1)
        x = self.layer(0, self.first.repeat(len(z), 1, 1, 1), a)
        picture = self.larger(self.coloured(0, x, first))
        x = self.layer(2, self.layer(1, self.larger(x), b), c)
        return (picture + self.coloured(1, x, last)).movedim(3, 1)


right(styles, "styles_on_both_sides_of_a_product", "scaled inputs for scaled weights", ScaledOnBothSides)
wrong(
    styles,
    ScaledOnBothSides,
    one_norm_without_the_style=("a factor missing", "layers.1.conv"),
    last_grain_after_the_activation=("a term at another point", "layers.2"),
    first_norm_held=("a detach too many", "layers.0.conv", ("input gradient", "weight gradient")),
    mean_style_follows_too_slowly=("another momentum", "mapping", "buffer"),
    styles_shrink_towards_nothing_in_eval=("a term missing in eval mode", "mapping", "eval"),
)
