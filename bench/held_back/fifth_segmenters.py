"""Ports of two networks that label pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_segmenters import Atrous, UNet, atrous, unet
from bench.held_back._fifth_vision import SAME, Stats, right, tapped
from bench.held_back._fourth_ports import Port, leaf, pile, wrong


class FlatU(Port):
    """The U as functions of one flat dict of weights; convolutions of what is joined are sums of two."""

    def take(self, model: UNet) -> None:
        weights = {name.replace(".", "_"): leaf(p) for name, p in model.named_parameters()}
        for level in range(2):
            both = weights.pop(f"ups_{level}_twice_conv1_weight").detach().chunk(2, 1)
            weights[f"ups_{level}_skip"], weights[f"ups_{level}_below"] = map(leaf, both)
        self.w = nn.ParameterDict(weights)

    def norm(self, name: str, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        correction = 1 if (name, self.fault) == ("bottom_norm2", "spread_of_the_bottom_unbiased") else 0
        spread, middle = torch.var_mean(flat, 2, correction=correction, keepdim=True)
        flat = (flat - middle) / (spread + 1e-5).sqrt()
        flat = torch.addcmul(self.w[name + "_bias"][:, None], flat, self.w[name + "_weight"][:, None])
        return torch.where(flat > 0, flat, 0.01 * flat).view_as(x)

    def twice(self, name: str, x: Tensor, below: Tensor | None = None) -> Tensor:
        if below is None:
            y = F.conv2d(x, self.w[name + "_conv1_weight"], padding=1)
        else:
            place = name.removesuffix("twice")
            y = F.conv2d(x, self.w[place + "skip"], padding=1)
            y = y + F.conv2d(below, self.w[place + "below"], padding=1)
        y = self.norm(name + "_norm1", y + self.w[name + "_conv1_bias"][:, None, None])
        y = F.conv2d(y, self.w[name + "_conv2_weight"], self.w[name + "_conv2_bias"], padding=1)
        return self.norm(name + "_norm2", y)

    def enlarged(self, name: str, x: Tensor) -> Tensor:
        turned = self.fault == "enlarging_kernel_transposed" and name == "ups_0_up"
        pattern = "nchw,coji->nohiwj" if turned else "nchw,coij->nohiwj"
        y = torch.einsum(pattern, x, self.w[name + "_weight"]).flatten(4).flatten(2, 3)
        return y + self.w[name + "_bias"][:, None, None]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.twice("downs_0", x)
        second = self.twice("downs_1", first.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5)))
        x = self.twice("bottom", F.max_pool2d(second, 2))
        small = self.twice("ups_0_twice", second, self.enlarged("ups_0_up", x))
        large = self.twice("ups_1_twice", first, self.enlarged("ups_1_up", small))
        held = small.detach() if self.fault == "coarse_head_holds_its_features" else small
        coarse, fine = self.w["coarse_weight"], self.w["fine_weight"]
        return {
            "coarse": F.conv2d(held, coarse, self.w["coarse_bias"]),
            "fine": F.conv2d(large, fine, self.w["fine_bias"]),
        }


right(unet, "u_of_split_convolutions", "port to functions of a flat dict", FlatU)
wrong(
    unet,
    FlatU,
    enlarging_kernel_transposed=("axes swapped", "ups.0.up"),
    spread_of_the_bottom_unbiased=("unbiased variance", "bottom.norm2"),
    coarse_head_holds_its_features=("a detach too many", ("coarse", ""), "input gradient"),
)


class Level(Port):
    """A unit of [N, H, W, C]."""

    def take(self, unit: nn.Sequential) -> None:
        self.stride, self.rate = unit[0].stride[0], unit[0].dilation[0]
        self.kernel, self.norm = leaf(unit[0].weight), Stats(unit[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(tapped(x, self.kernel, self.stride, self.rate)).relu()


class Slabs(Port):
    """The pyramid of [N, H, W, C]: no map is joined, each meets its slab of the last unit's weight."""

    def take(self, model: Atrous) -> None:
        self.trunk = nn.Sequential(*map(Level, model.backbone))
        self.branches = nn.ModuleList(map(Level, model.pyramid.branches))
        self.mean, self.mean_norm = leaf(model.pyramid.pooled[0].weight), Stats(model.pyramid.pooled[1])
        self.slabs = pile(model.pyramid.project[0].weight[..., 0, 0].T.chunk(4))
        self.joined = Stats(model.pyramid.project[1])
        self.head, self.bias = leaf(model.head.weight[..., 0, 0]), leaf(model.head.bias)

    def enlarged(self, x: Tensor, size: int) -> Tensor:
        """By one matrix for both axes."""
        corners = self.fault == "corners_aligned_in_the_last_resize"
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[None]
        matrix = F.interpolate(eye, size=size, mode="linear", align_corners=corners)[0]
        return torch.einsum("nhwc,hy,wx->ncyx", x, matrix, matrix)

    def forward(self, image: Tensor) -> Tensor:
        x = self.trunk(image.permute(0, 2, 3, 1))
        mean = self.mean_norm(tapped(x.mean((1, 2), keepdim=True), self.mean)).relu()
        maps = [mean, *(branch(x) for branch in self.branches)]
        joined = sum(part @ slab for part, slab in zip(maps, self.slabs.roll(1, 0), strict=True))
        return self.enlarged(self.joined(joined).relu() @ self.head.T + self.bias, image.shape[-1])


right(atrous, "pyramid_of_slabs", "port to channels last", Slabs)
wrong(atrous, Slabs, corners_aligned_in_the_last_resize=("corner alignment", ""))


@method_of("backbone.2.0", SAME, "a dilated convolution by phases", atrous)
def dilated_convolution_by_phases(self, x: Tensor) -> Tensor:
    edge, length = self.padding[0], x.shape[-1]
    odd = length % 2
    phases = F.pixel_unshuffle(F.pad(x, (edge, edge + odd, edge, edge + odd)), 2)
    phases = phases.unflatten(1, (-1, 4)).transpose(1, 2)
    y = F.conv2d(phases.flatten(0, 1), self.weight).unflatten(0, (-1, 4))
    return F.pixel_shuffle(y.transpose(1, 2).flatten(1, 2), 2)[..., :length, :length]


@method_of("pyramid.branches.1.0", "bug", "padding that reflects", atrous)
def reflection_at_the_borders(self, x: Tensor) -> Tensor:
    x = F.pad(x, (2, 2, 2, 2), mode="reflect")
    return F.conv2d(x, self.weight, dilation=self.dilation)
