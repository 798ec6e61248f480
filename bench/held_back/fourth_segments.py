"""Segmentation with dilated branches beside a view of the whole picture, and a finer map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, leaf, parts, wrong
from bench.tasks import _task

EPS = 1e-3


def _unit(inside: int, out: int, size: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, out, size, stride, size // 2 * dilation, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out, eps=EPS), nn.ReLU())


class Spatial(nn.Module):
    def __init__(self):
        super().__init__()
        self.point, self.wide, self.wider = _unit(16, 16, 1), _unit(16, 16, 3, 1, 2), _unit(16, 16, 3, 1, 3)
        self.whole, self.merge = nn.Sequential(nn.AdaptiveAvgPool2d(1), _unit(16, 16, 1)), _unit(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        views = [self.point(x), self.wide(x), self.wider(x), self.whole(x).expand_as(x)]
        return self.merge(torch.cat(views, 1))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.deep, self.spatial = _unit(3, 12, 3, 2), _unit(12, 16, 3, 2), Spatial()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.low, self.join, self.label = _unit(12, 8, 1), _unit(24, 16, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.stem(x)
        deep = self.up(self.spatial(self.deep(low)))
        return {"out": self.label(self.join(torch.cat([self.low(low), deep], 1)))}


class FoldingSegmenter(Port):
    """One function for every unit, sums for concatenations; in eval mode norms are folded into kernels."""

    def take(self, model: Segmenter) -> None:
        self.kernels, self.affine = nn.ParameterDict(), nn.ParameterDict()
        for name, unit in model.named_modules():
            if isinstance(unit, nn.Sequential) and isinstance(unit[0], nn.Conv2d):
                name, norm = name.replace(".", "_"), unit[1]
                self.kernels[name] = leaf(unit[0].weight)
                self.affine[name] = leaf(torch.stack([norm.weight, norm.bias]))
                self.register_buffer("at_" + name, torch.stack([norm.running_mean, norm.running_var]))
        self.label, self.label_bias = leaf(model.label.weight.flatten(1)), leaf(model.label.bias)

    def unit(self, name: str, *maps: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        kernel, (scale, shift) = self.kernels[name], self.affine[name]
        statistics = getattr(self, "at_" + name)
        edge = kernel.shape[-1] // 2 * dilation
        if not self.training:
            eps = 0 if name == "join" and self.fault == "folded_without_epsilon" else EPS
            scale = scale / (statistics[1] + eps).sqrt()
            kernel, shift = kernel * scale.view(-1, 1, 1, 1), shift - statistics[0] * scale
        slices = kernel.split([x.shape[1] for x in maps], 1)
        if name == "spatial_merge" and self.fault == "whole_and_point_exchanged":
            slices = slices[3], slices[1], slices[2], slices[0]
        x = sum(F.conv2d(x, k, None, stride, edge, dilation) for x, k in zip(maps, slices, strict=True))
        if not self.training:
            return (x + shift[:, None, None]).relu()
        rate = 0.9 if name == "spatial_point" and self.fault == "rate_turned_round" else 0.1
        return F.batch_norm(x, *statistics, scale, shift, True, rate, EPS).relu()

    def spatial(self, x: Tensor) -> Tensor:
        late, wider = self.fault == "pooled_after_the_unit", 2 if self.fault == "both_dilated_by_two" else 3
        whole = self.unit("spatial_whole_1", x if late else x.mean((2, 3), keepdim=True))
        views = [self.unit("spatial_point", x), self.unit("spatial_wide", x, dilation=2)]
        views += [self.unit("spatial_wider", x, dilation=wider), whole.mean((2, 3), keepdim=True)]
        return self.unit("spatial_merge", *views)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.unit("stem", x, stride=2)
        deep = self.spatial(self.unit("deep", low, stride=2))
        unit = torch.eye(deep.shape[-1], dtype=x.dtype, device=x.device)[None]
        stretch = F.interpolate(unit, scale_factor=2, mode="linear")[0]
        repeated = self.fault == "rows_repeated_not_blended"
        rows = F.interpolate(unit, scale_factor=2, mode="nearest")[0] if repeated else stretch
        deep = torch.einsum("nchw,hi,wj->ncij", deep, rows, stretch)
        x = self.unit("join", self.unit("low", low), deep)
        return {"labels": torch.einsum("nchw,oc->nohw", x, self.label) + self.label_bias[:, None, None]}


def _scenes() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16), torch.randint(4, (8, 8, 8))


wrong(
    _task("fourth_segmenter", Segmenter, _scenes, lambda x, y: F.cross_entropy(*parts(x), y)),
    FoldingSegmenter,
    both_dilated_by_two=("dilation of one branch", "spatial.wider.0"),
    whole_and_point_exchanged=("order of branches", ("spatial.merge", "spatial.merge.0", "spatial")),
    pooled_after_the_unit=("order of two steps", ("spatial.whole", "spatial.whole.0")),
    rows_repeated_not_blended=("upsampling of one axis", "up"),
    folded_without_epsilon=("an epsilon in eval mode", ("join", "join.1"), "eval"),
    rate_turned_round=("momentum of one norm", "spatial.point.1", "buffer"),
)
