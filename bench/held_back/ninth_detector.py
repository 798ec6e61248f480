"""Two ports of a detector without anchors: a tree with channels last, and one flat module."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._ninth_detector import FCOS, GROUPS, STRIDES, detection, scenes
from bench.held_back._sixth_ports import few

points = few("ninth_detector", FCOS, scenes, detection)
EXTRA, STRIDED, SIDES = "backbone.fpn.extra_blocks", "backbone.body.layer2.0.conv", "head.regression_head"


def corners(sides: Tensor, step: int, most: list[int] | None) -> Tensor:
    rows, columns = ((torch.arange(n).to(sides) + 0.5) * step for n in sides.shape[1:3])
    middle = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), 2)
    low, high = (sides * step).chunk(2, 3)
    boxes = torch.cat([middle - low, middle + high], 3)
    return boxes if most is None else boxes.clamp(min=0).minimum(boxes.new_tensor(most * 2))


def together(read: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    joined = (torch.cat([x.flatten(1, 2) for x in part], 1) for part in zip(*read, strict=True))
    return dict(zip(("cls_logits", "boxes", "bbox_ctrness"), joined, strict=True))


class Conv(nn.Module):
    def __init__(self, *convs: nn.Conv2d, fault: str = ""):
        super().__init__()
        self.fault, self.stride, biases = fault, convs[0].stride[0], [c.bias for c in convs]
        self.kernel = leaf(torch.cat([c.weight for c in convs]))
        bare = biases[0] is None or self.fault == "second_class_layer_without_its_shift"
        self.shift = None if bare else leaf(torch.cat(biases))

    def forward(self, x: Tensor) -> Tensor:
        return spatial(x, self.kernel, self.shift, self.stride)


class Fixed(Port):
    def take(self, norm: nn.Module) -> None:
        self.register_buffer("constants", torch.stack([*norm.buffers()]))

    def forward(self, x: Tensor) -> Tensor:
        gain, offset, center, spread = self.constants
        slope = gain / (spread + 1e-5).sqrt()
        moved = center * (gain if self.fault == "fixed_shift_forgets_the_deviation" else slope)
        return x * slope + (offset - moved)


def unit(conv: nn.Conv2d, norm: nn.Module, fault: str = "") -> nn.Sequential:
    norm = Rows(norm) if isinstance(norm, nn.BatchNorm2d) else Fixed(norm, fault)
    return nn.Sequential(Conv(conv), norm)


class Residual(Port):
    def take(self, block: nn.Module) -> None:
        self.narrow, self.wide = unit(block.conv1, block.bn1), unit(block.conv3, block.bn3)
        self.middle = unit(block.conv2, block.bn2, self.fault)
        if self.fault == "last_averages_follow_the_batch":
            self.middle[1].rate = 0.9
        self.skip = nn.Identity() if block.downsample is None else unit(*block.downsample)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.wide(self.middle(self.narrow(x).relu()).relu()))


class Pyramid(Port):
    def take(self, fpn: nn.Module) -> None:
        self.across, self.smooth = (nn.ModuleList(map(Conv, x)) for x in (fpn.inner_blocks, fpn.layer_blocks))
        self.sixth, self.seventh = Conv(fpn.extra_blocks.p6), Conv(fpn.extra_blocks.p7)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [conv(x) for conv, x in zip(self.across, maps, strict=True)]
        for i in (1, 0):
            above = maps[i + 1].repeat_interleave(2, 1).repeat_interleave(2, 2)
            maps[i] = maps[i] + above[:, : maps[i].shape[1], : maps[i].shape[2]]
        maps = [conv(x) for conv, x in zip(self.smooth, maps, strict=True)]
        sixth = self.sixth(maps[2])
        signed = self.fault == "coarsest_level_of_signed_values"
        return [*maps, sixth, self.seventh(sixth if signed else sixth.relu())]


class Branch(nn.Module):
    def __init__(self, tower: nn.Sequential, *ends: nn.Conv2d, fault: str = ""):
        super().__init__()
        self.convs = nn.ModuleList([Conv(tower[0]), Conv(tower[3], fault=fault), Conv(*ends)])
        self.norms = nn.ParameterList(pile(tower[i].parameters()) for i in (1, 4))

    def forward(self, x: Tensor) -> Tensor:
        for i, norm in enumerate(self.norms):
            x = F.group_norm(self.convs[i](x).movedim(3, 1), GROUPS, *norm).relu().movedim(1, 3)
        return self.convs[2](x)


class ChannelsLast(Port):
    def take(self, model: FCOS) -> None:
        body, (classes, sides) = model.backbone.body, model.head.values()
        blocks, faults = [*body.layer1, *body.layer2, *body.layer3], [self.fault, *[""] * 4, self.fault]
        self.stem, self.blocks = unit(body.conv1, body.bn1), nn.ModuleList(map(Residual, blocks, faults))
        self.pyramid = Pyramid(model.backbone.fpn, self.fault)
        self.classes = Branch(classes.conv, classes.cls_logits, fault=self.fault)
        self.sides = Branch(sides.conv, sides.bbox_reg, sides.bbox_ctrness)
        self.stretch = leaf(sides.scales)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        less = 1 if self.fault == "boxes_end_at_the_size_less_one" else 0
        most = None if self.training else [n - less for n in images.shape[:1:-1]]
        x = self.stem(images.movedim(1, 3)).relu().movedim(3, 1)
        maps, read = [F.max_pool2d(x, 3, 2, 1).movedim(1, 3)], []
        for block in self.blocks:
            maps.append(block(maps[-1]))
        for x, step, stretch in zip(self.pyramid(maps[2::2]), STRIDES, self.stretch, strict=True):
            sides, central = self.sides(x).split([4, 1], 3)
            read.append((self.classes(x), corners((sides * stretch).exp(), step, most), central))
        return together(read)


class Flat(Port):
    def take(self, model: FCOS) -> None:
        body, fpn, heads = model.backbone.body, model.backbone.fpn, [*model.head.values()]
        self.w = nn.ParameterDict({"scales": leaf(heads[1].scales)})

        def keep(name: str, *layers: nn.Module) -> None:
            self.w[name] = leaf(torch.cat([layer.weight for layer in layers]))
            self.w[name + "_b"] = leaf(torch.cat([layer.bias for layer in layers]))

        norms = [m for m in body.modules() if hasattr(m, "running_var")]
        for i, conv in enumerate(m for m in body.modules() if isinstance(m, nn.Conv2d)):
            self.w[f"body{i}"], live = leaf(conv.weight), isinstance(norms[i], nn.BatchNorm2d)
            self.register_buffer(f"known{i}", torch.stack([*norms[i].buffers()][: 2 if live else 4]))
            if live:
                keep(f"norm{i}", norms[i])
        for i in (0, 1, 3, 4):
            keep(f"tower{i}", *(head.conv[i] for head in heads))
        for i, layer in enumerate([*fpn.layer_blocks, *fpn.extra_blocks.children()]):
            keep(f"smooth{i}", layer)
        for i, end in enumerate((heads[0].cls_logits, heads[1].bbox_reg, heads[1].bbox_ctrness)):
            keep(f"end{i}", end)
            keep(f"across{i}", fpn.inner_blocks[i])

    def step(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        kernel, known = self.w[f"body{i}"], getattr(self, f"known{i}")
        x = F.conv2d(x, kernel, None, stride, kernel.shape[3] // 2)
        if len(known) == 4:
            return F.batch_norm(x, *known[2:], *known[:2])
        return F.batch_norm(x, *known, self.w[f"norm{i}"], self.w[f"norm{i}_b"], self.training)

    def around(self, name: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        return F.conv2d(x, self.w[name], self.w[name + "_b"], stride, 1, 1, groups)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        most = None if self.training else [*images.shape[:1:-1]]
        maps, levels, read = [F.max_pool2d(self.step(0, images, 2).relu(), 3, 2, 1)], [], []
        for i, at in enumerate((1, 5, 8, 12, 15, 19)):
            x, stride = maps[-1], 2 if i in (2, 4) else 1
            early = stride if self.fault == "second_stage_strides_before_its_window" and i == 2 else 1
            y = self.step(at + 1, self.step(at, x, early).relu(), stride // early).relu()
            x = x if i % 2 else self.step(at + 3, x, stride)
            maps.append((self.step(at + 2, y) + x).relu())
        inner = [F.conv2d(maps[2 * i + 2], self.w[f"across{i}"], self.w[f"across{i}_b"]) for i in range(3)]
        for i in (2, 1, 0):
            if i < 2:
                smoothed = self.fault == "finest_level_adds_a_smoothed_map" and i == 0
                above = levels[0] if smoothed else inner[i + 1]
                inner[i] = inner[i] + F.interpolate(above, inner[i].shape[2:])
            levels.insert(0, self.around(f"smooth{i}", inner[i]))
        levels.append(self.around("smooth3", levels[2], 2))
        levels.append(self.around("smooth4", levels[3].relu(), 2))
        for x, step, scale in zip(levels, STRIDES, self.w["scales"], strict=True):
            for i in (0, 3):
                x = self.around(f"tower{i}", x, 1, 2 if i else 1)
                x = F.group_norm(x, 2 * GROUPS, self.w[f"tower{i + 1}"], self.w[f"tower{i + 1}_b"]).relu()
            kinds, sides = x.chunk(2, 1)
            asked = kinds if self.fault == "centredness_read_from_the_classes" else sides
            x = [self.around(f"end{i}", x).movedim(1, 3) for i, x in enumerate((kinds, sides, asked))]
            read.append((x[0], corners((x[1] * scale).exp(), step, most), x[2]))
        return together(read)


right(points, "detector_with_the_channels_last", "a tree with the channels last", ChannelsLast)
right(points, "detector_with_its_towers_in_one", "one flat module, two towers in one", Flat)
wrong(
    points,
    ChannelsLast,
    fixed_shift_forgets_the_deviation=("frozen norm folded wrongly", "backbone.body.layer1.0.bn2"),
    last_averages_follow_the_batch=("momentum the other way round", "backbone.body.layer3.1.bn2", "buffer"),
    coarsest_level_of_signed_values=("an activation missing", (EXTRA, EXTRA + ".p7")),
    second_class_layer_without_its_shift=("a bias left out", "head.classification_head.conv.3"),
    boxes_end_at_the_size_less_one=("boxes cut one pixel early", "box_coder", "eval"),
)
wrong(
    points,
    Flat,
    second_stage_strides_before_its_window=("stride in another layer", (STRIDED + "1", STRIDED + "2")),
    finest_level_adds_a_smoothed_map=("a map taken too late", "backbone.fpn"),
    centredness_read_from_the_classes=("input from another branch", (SIDES, SIDES + ".bbox_ctrness")),
)
