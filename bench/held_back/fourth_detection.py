"""A detector without anchors: a feature pyramid and one head for all its levels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, Rows, leaf, parts, pile, spatial, wrong
from bench.tasks import _task


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(inside, 16, 1) for inside in (12, 20))
        self.smooth = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, fine: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor]:
        top = self.lateral[1](coarse)
        low = self.lateral[0](fine) + F.interpolate(top, scale_factor=2)
        return self.smooth[0](low), self.smooth[1](top)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.label, self.box, self.center = (nn.Conv2d(16, out, 3, padding=1) for out in (5, 4, 1))
        self.scales = nn.Parameter(torch.tensor([1.3, 0.8]))

    def forward(self, level: Tensor, index: int) -> Tensor:
        """[N, C, H, W] -> [N, H W, 10]: labels, distances to the four sides, centerness."""
        h = self.tower(level)
        box = torch.exp(self.scales[index] * self.box(h))
        if not self.training:
            box = box * 2 ** (index + 1)
        return torch.cat([self.label(h), box, self.center(h)], 1).flatten(2).mT


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.deeper = nn.Sequential(nn.Conv2d(12, 20, 3, 2, 1, bias=False), nn.BatchNorm2d(20), nn.ReLU())
        self.pyramid, self.head = Pyramid(), Head()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        fine = self.stem(x)
        levels = self.pyramid(fine, self.deeper(fine))
        return torch.cat([self.head(level, i) for i, level in enumerate(levels)], 1).split([5, 4, 1], 2)


class PixelDetector(Port):
    """Channels last, the three last convolutions as one, a dict of what it finds."""

    def take(self, model: Detector) -> None:
        stages, head = (model.stem, model.deeper), model.head
        self.kernels = nn.ParameterList(leaf(stage[0].weight) for stage in stages)
        self.norms = nn.ModuleList(Rows(stage[1]) for stage in stages)
        self.norms[1].rate *= self.fault != "coarse_statistics_stand_still"
        self.across = nn.ParameterList(leaf(conv.weight.flatten(1).T) for conv in model.pyramid.lateral)
        self.across_bias = pile(conv.bias for conv in model.pyramid.lateral)
        self.smooth = pile(conv.weight for conv in (*model.pyramid.smooth, head.tower[0]))
        self.smooth_bias = pile(conv.bias for conv in (*model.pyramid.smooth, head.tower[0]))
        self.affine = pile([head.tower[1].weight, head.tower[1].bias])
        box, order = head.box, [1, 0, 3, 2] if self.fault == "sides_start_at_the_top" else [0, 1, 2, 3]
        self.last = leaf(torch.cat([head.label.weight, box.weight[order], head.center.weight]))
        self.last_bias = leaf(torch.cat([head.label.bias, box.bias[order], head.center.bias]))
        self.scales = leaf(head.scales)

    def levels(self, x: Tensor) -> list[Tensor]:
        fine = self.norms[0](spatial(x, self.kernels[0], stride=2)).relu()
        maps = fine, self.norms[1](spatial(fine, self.kernels[1], stride=2)).relu()
        low, top = (x @ w + b for x, w, b in zip(maps, self.across, self.across_bias, strict=True))
        smoothed = spatial(top, self.smooth[1], self.smooth_bias[1])
        added = smoothed if self.fault == "smoothed_map_goes_down" else top
        low = low + added.repeat_interleave(2, 1).repeat_interleave(2, 2)
        return [spatial(low, self.smooth[0], self.smooth_bias[0]), smoothed]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = [spatial(x, self.smooth[2], self.smooth_bias[2]) for x in self.levels(x.permute(0, 2, 3, 1))]
        normed = [F.group_norm(x.flatten(1, 2).mT, 4, *self.affine) for x in maps]
        if self.fault == "levels_normed_together":
            rows = torch.cat([x.flatten(1, 2) for x in maps], 1).mT
            normed = F.group_norm(rows, 4, *self.affine).split([64, 16], 2)
        found = []
        for i, (h, like) in enumerate(zip(normed, maps, strict=True)):
            h = h.relu().mT.reshape(like.shape)
            label, box, center = spatial(h, self.last, self.last_bias).flatten(1, 2).split([5, 4, 1], 2)
            if self.fault == "centerness_does_not_teach_the_tower":
                center = spatial(h.detach(), self.last[9:], self.last_bias[9:]).flatten(1, 2)
            stride = 2 if self.fault == "one_stride_for_both_levels" else (2, 4)[i]
            box = (self.scales[i] * box).exp() * (1 if self.training else stride)
            found.append((label, box, center))
        names = "labels", "sides", "centers"
        return {name: torch.cat(x, 1) for name, x in zip(names, zip(*found, strict=True), strict=True)}


def _found(outputs: tuple | dict, targets: Tensor) -> Tensor:
    labels, sides, centers = parts(outputs)
    truth = targets.to(sides)
    loss = F.cross_entropy(labels.mT, targets[..., 0].long()) + F.smooth_l1_loss(sides, truth[..., 1:5])
    return loss + F.binary_cross_entropy_with_logits(centers, truth[..., 5:])


def _scenes() -> tuple[Tensor, Tensor]:
    truth = torch.cat([torch.randint(5, (4, 80, 1)), 3 * torch.rand(4, 80, 4), torch.rand(4, 80, 1)], 2)
    return torch.randn(4, 3, 16, 16), truth


wrong(
    _task("fourth_detector", Detector, _scenes, _found),
    PixelDetector,
    smoothed_map_goes_down=("residual from the wrong place", "pyramid"),
    levels_normed_together=("statistics over too much", "head.tower.1"),
    sides_start_at_the_top=("order of channels", ("head.box", "head")),
    one_stride_for_both_levels=("scale of one level in eval mode", "head", "eval"),
    coarse_statistics_stand_still=("a buffer that does not move", "deeper.1", "buffer"),
    centerness_does_not_teach_the_tower=("detach", ("head.center", "head"), "input gradient"),
)
