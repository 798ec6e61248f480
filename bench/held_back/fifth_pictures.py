"""Ports of two networks that make pictures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_pixels import Enlarger, Painter, enlarger, moments, painter
from bench.held_back._fifth_vision import SAME, right
from bench.held_back._fourth_ports import Port, leaf, wrong


class Columns(Port):
    """The enlarger with convolutions as products of matrices, and pixels from the depth of [N, H, W, C]."""

    def take(self, model: Enlarger) -> None:
        blocks = [conv for block in model.body[:3] for conv in (block.conv1, block.conv2)]
        convs = [model.head, *blocks, model.body[3], model.widen, model.tail]
        self.matrices, self.rows = nn.ParameterList(), nn.ParameterList()
        for conv in convs:
            weight, bias = conv.weight, conv.bias
            if conv is model.widen:
                weight, new = (p.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1) for p in (weight, bias))
                bias = bias if self.fault == "biases_left_in_the_old_order" else new
            self.matrices.append(leaf(weight.flatten(1)))
            self.rows.append(leaf(bias))
        self.register_buffer("mean", model.mean[:, 0, 0].clone())

    def conv(self, index: int, x: Tensor) -> Tensor:
        count, high, wide, _ = x.shape
        columns = F.unfold(x.movedim(-1, 1), 3, padding=1).transpose(1, 2)
        y = torch.addmm(self.rows[index], columns.flatten(0, 1), self.matrices[index].T)
        return y.view(count, high, wide, -1)

    def from_depth(self, x: Tensor) -> Tensor:
        """[N, H, W, 4 C] -> [N, 2 H, 2 W, C]; the place in the square is the slow axis of the depth."""
        count, high, wide, _ = x.shape
        square = x.view(count, high, wide, 2, 2, -1).transpose(2, 3)
        return square.reshape(count, 2 * high, 2 * wide, -1)

    def forward(self, image: Tensor) -> Tensor:
        start = x = self.conv(0, image.permute(0, 2, 3, 1) - self.mean)
        for block in range(3):
            y = self.conv(2 * block + 2, self.conv(2 * block + 1, x).relu())
            x = torch.add(x, y, alpha=0.5)
            if self.fault == "long_skip_from_behind_a_block" and block == 0:
                start = x
        x = self.from_depth(self.conv(8, start + self.conv(7, x)))
        return (self.conv(9, x) + self.mean).permute(0, 3, 1, 2)


right(enlarger, "pixels_from_depth", "port to products of matrices", Columns)
wrong(
    enlarger,
    Columns,
    long_skip_from_behind_a_block=("residual from the wrong place", ""),
    biases_left_in_the_old_order=("order of entries", "widen"),
)


def short(x: Tensor) -> Tensor:
    """Rounded to eight bits, as the operands of a fast product of matrices are."""
    mantissa, exponent = torch.frexp(x.detach())
    return x + (torch.ldexp((mantissa * 256).round() / 256, exponent) - x).detach()


@method_of("widen", "reduced_precision", "operands in fewer bits", enlarger)
def one_convolution_of_short_operands(self, x: Tensor) -> Tensor:
    return F.conv2d(short(x), short(self.weight), self.bias, padding=1)


class Gathered(Port):
    """The painter with borders and enlargement by indices, both pictures encoded at once."""

    def take(self, model: Painter) -> None:
        for name, part in (("seen", model.encoder), ("drawn", model.decoder)):
            convs = [module for module in part if isinstance(module, nn.Conv2d)]
            for index, conv in enumerate(convs):
                learns = name == "drawn" or self.fault == "encoder_learns_too"
                for key, values in (("w", conv.weight.flatten(1)), ("b", conv.bias[:, None])):
                    setattr(self, f"{name}{index}{key}", leaf(values).requires_grad_(learns))

    def conv(self, name: str, x: Tensor, stride: int = 1, factor: int = 1) -> Tensor:
        length = factor * x.shape[-1]
        places = torch.arange(-1, length + 1, device=x.device).abs()
        places = (length - 1 - (length - 1 - places).abs()) // factor
        windows = x[:, :, places][:, :, :, places].unfold(2, 3, stride).unfold(3, 3, stride)
        flat = windows.permute(0, 1, 4, 5, 2, 3).flatten(1, 3)
        y = getattr(self, name + "w") @ flat.flatten(2) + getattr(self, name + "b")
        return y.unflatten(2, flat.shape[2:])

    def encode(self, x: Tensor) -> Tensor:
        x = self.conv("seen1", self.conv("seen0", x).relu(), 2).relu()
        return self.conv("seen2", x).relu()

    def restyle(self, content: Tensor, style: Tensor) -> Tensor:
        flat, other = content.flatten(2), style.flatten(2)
        count = flat.shape[2] - (0 if self.fault == "style_spread_biased" else 1)
        middle, new_middle = flat.mean(2, keepdim=True), other.mean(2, keepdim=True)
        spread = (flat - middle).square().sum(2, keepdim=True) / (flat.shape[2] - 1)
        new_spread = (other - new_middle).square().sum(2, keepdim=True) / count
        scale = ((new_spread + 1e-5) / (spread + 1e-5)).sqrt()
        return torch.addcmul(new_middle, flat - middle, scale).view_as(content)

    def forward(self, content: Tensor, style: Tensor) -> dict[str, Tensor]:
        features, styled = self.encode(torch.cat([content, style])).chunk(2)
        aim = self.restyle(features, styled)
        y = self.conv("drawn0", aim).relu()
        picture = self.conv("drawn2", self.conv("drawn1", y, factor=2).relu())
        return {"picture": picture, "made": self.encode(picture), "aim": aim, "styled": styled}


ENCODER = tuple(f"encoder.{index}" for index in (1, 4, 7))

right(painter, "borders_and_enlargement_by_indices", "port to gathered windows", Gathered)
wrong(
    painter,
    Gathered,
    style_spread_biased=("biased variance", "restyle"),
    encoder_learns_too=("a weight that was frozen", ENCODER, ("weight gradient", "update")),
)


@method_of("restyle", SAME, "moments by another formula", painter)
def restyled_by_instance_norm(self, content: Tensor, style: Tensor) -> Tensor:
    count = content.shape[2] * content.shape[3]
    ratio = count / (count - 1)
    normed = F.instance_norm(content, eps=1e-5 / ratio) / ratio**0.5
    mean, deviation = moments(style)
    return torch.addcmul(mean, normed, deviation)
