"""Two ports of a small PointPillars: a tree with the channels last, and one class of packed matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_first_point_pillars as pp
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_point_pillars", pp.PointPillar, pp.drive, pp.anchors_loss)
SAID = [pp.TURNS * n for n in (pp.CLASSES, pp.CODE, 2)]


class Decorated(nn.Module):
    """Points with their offsets from the pillar's mean and centre, nothing where there is no point."""

    half = 0.5

    def forward(self, points: Tensor, count: Tensor, cell: Tensor) -> Tensor:
        place = points[..., :3]
        mean = place.sum(2, True) / count[..., None, None]
        middle = (cell.flip(-1) + self.half) * points.new_tensor(pp.VOXEL) + points.new_tensor(pp.START)
        there = torch.arange(points.shape[2]) < count[..., None]
        every = torch.cat([points, place - mean, place - middle[:, :, None]], -1)
        return every.masked_fill(~there[..., None], 0)


class PointNet(nn.Module):
    """Two layers by point; the second takes the points and their pillar's maximum by weights of their own."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.enter, self.calm, self.settle = leaf(first.linear.weight.T), Rows(first.norm), Rows(second.norm)
        own, whole = second.linear.weight.chunk(2, 1)
        self.own, self.whole, self.still = leaf(own.T), leaf(whole.T), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.calm(x @ self.enter).relu()
        top = x.amax(2, True)
        x = x @ self.own + (top.detach() if self.still else top) @ self.whole
        return self.settle(x).amax(2).relu()


class Step(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.kernel, self.norm, self.stride = leaf(conv.weight), Rows(norm), conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(spatial(x, self.kernel, None, self.stride)).relu()


class Enlarge(nn.Module):
    def __init__(self, conv: nn.ConvTranspose2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.squares, self.norm, self.turned = leaf(conv.weight.permute(2, 3, 0, 1)), Rows(norm), False

    def forward(self, x: Tensor) -> Tensor:
        squares = self.squares.transpose(0, 1) if self.turned else self.squares
        y = torch.einsum("nhwc,ijcu->nhiwju", x, squares)
        return self.norm(y.flatten(3, 4).flatten(1, 2)).relu()


class Stage(nn.Module):
    def __init__(self, block: nn.Sequential, deblock: nn.Sequential):
        super().__init__()
        steps = (Step(block[i], block[i + 1]) for i in range(1, len(block), 3))
        self.down, self.up = nn.Sequential(*steps), Enlarge(*deblock[:2])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down(x)
        return x, self.up(x)


class PillarsOfStages(Port):
    """Stages that go down and look up, channels last; one product makes all that the heads say."""

    def take(self, model: pp.PointPillar) -> None:
        trunk, head = model.backbone_2d, model.dense_head
        self.decorate, self.points = Decorated(), PointNet(*model.vfe.pfn_layers)
        if self.fault == "point_pillars_centre_taken_at_the_cells_corner":
            self.decorate.half = 0
        self.points.still = self.fault == "point_pillars_repeated_maximum_detached"
        self.stages = nn.ModuleList(map(Stage, trunk.blocks, trunk.deblocks))
        norm = self.stages[1].down[1].norm
        norm.own = self.fault == "point_pillars_second_block_norm_by_batch_in_evaluation"
        self.stages[2].up.turned = self.fault == "point_pillars_last_upsampling_squares_transposed"
        convs = head.conv_cls, head.conv_box, head.conv_dir_cls
        self.say = leaf(torch.cat([x.weight.flatten(1) for x in convs]).T)
        self.lean = leaf(torch.cat([x.bias for x in convs]))

    def forward(self, voxels: Tensor, voxel_num_points: Tensor, voxel_coords: Tensor) -> tuple[Tensor, ...]:
        pillars = self.points(self.decorate(voxels, voxel_num_points, voxel_coords))
        frames = torch.arange(len(voxels))[:, None].expand(pillars.shape[:2])
        x = pillars.new_zeros(len(voxels), pp.HIGH, pp.WIDE, pillars.shape[2])
        x = x.index_put((frames, voxel_coords[..., 1], voxel_coords[..., 2]), pillars)
        seen = []
        for stage in self.stages:
            x, up = stage(x)
            seen.append(up)
        said = (torch.cat(seen, 3) @ self.say + self.lean).split(SAID, 3)
        return tuple(y.unflatten(3, (pp.TURNS, -1)).flatten(1, 3) for y in said)


class PackedPillars(Port):
    """Matrices in the order of their use; all norms in one table, and their statistics in another."""

    def take(self, model: pp.PointPillar) -> None:
        trunk, head, pairs = model.backbone_2d, model.dense_head, []
        pairs += [(x.linear.weight, x.norm) for x in model.vfe.pfn_layers]
        for block, deblock in zip(trunk.blocks, trunk.deblocks, strict=True):
            pairs += [(block[i].weight.flatten(1), block[i + 1]) for i in range(1, len(block), 3)]
            pairs.append((deblock[0].weight.flatten(1).T, deblock[1]))
        self.depths = [len(range(1, len(block), 3)) for block in trunk.blocks]
        self.w = nn.ParameterList(leaf(w) for w, _ in pairs)
        self.norms = leaf(torch.cat([torch.stack([n.weight, n.bias]) for _, n in pairs], 1))
        table = torch.cat([torch.stack([n.running_mean, n.running_var]) for _, n in pairs], 1)
        self.register_buffer("table", table.clone())
        self.ends = [0, *torch.tensor([len(n.weight) for _, n in pairs]).cumsum(0).tolist()]
        convs = head.conv_cls, head.conv_box, head.conv_dir_cls
        self.tell = leaf(torch.cat([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in convs]))

    def normed(self, x: Tensor, i: int) -> Tensor:
        """The ``i``-th norm of [N, C, ...]."""
        part, shape = slice(self.ends[i], self.ends[i + 1]), (-1, *[1] * (x.dim() - 2))
        mean, variance = self.table[:, part].clone()
        if self.training:
            rows = x.transpose(0, 1).flatten(1)
            variance, mean = torch.var_mean(rows, 1, correction=0)
            with torch.no_grad():
                fresh = torch.stack([mean, rows.var(1)])
                self.table[:, part] = 0.99 * self.table[:, part] + 0.01 * fresh
        usual = self.fault == "point_pillars_second_points_norm_with_the_usual_epsilon" and i == 1
        gain = self.norms[0, part] / (variance + (1e-5 if usual else 1e-3)).sqrt()
        return x * gain.view(shape) + (self.norms[1, part] - mean * gain).view(shape)

    def pillars(self, points: Tensor, count: Tensor, cell: Tensor) -> Tensor:
        """[M, T, 4] -> [M, C], by a product for the points, one for their mean and one for the centre."""
        first, place = self.w[0].T, points[..., :3]
        middle = (cell[:, [2, 1, 0]] + 0.5) * points.new_tensor(pp.VOXEL) + points.new_tensor(pp.START)
        both = torch.cat([first[:3] + first[4:7] + first[7:], first[3:4]])
        away = (place.sum(1) / count[:, None]) @ first[4:7] + middle @ first[7:]
        there = (torch.arange(points.shape[1]) < count[:, None])[..., None]
        x = (points @ both - away[:, None]) * there
        x = self.normed(x.transpose(1, 2), 0).clamp(min=0).transpose(1, 2)
        x = torch.cat([x, x.amax(1, True).expand_as(x)], 2) @ self.w[1].T
        return self.normed(x.transpose(1, 2), 1).clamp(min=0).amax(2)

    def forward(self, voxels: Tensor, voxel_num_points: Tensor, voxel_coords: Tensor) -> tuple[Tensor, ...]:
        given = voxels.flatten(0, 1), voxel_num_points.flatten(), voxel_coords.flatten(0, 1)
        x = self.pillars(*given).unflatten(0, voxels.shape[:2]).transpose(1, 2)
        at = voxel_coords[..., 1] * pp.WIDE + voxel_coords[..., 2]
        if self.fault == "point_pillars_canvas_filled_column_by_column":
            at = voxel_coords[..., 2] * pp.HIGH + voxel_coords[..., 1]
        canvas = x.new_zeros(*x.shape[:2], pp.HIGH * pp.WIDE)
        x = canvas.scatter(2, at[:, None].expand_as(x), x).unflatten(2, (pp.HIGH, pp.WIDE))
        seen, i = [], 2
        for k, depth in enumerate(self.depths):
            for j in range(depth):
                edge, stride = (1, 1, 1, 1), 1 if j else 2
                if self.fault == "point_pillars_third_block_padded_after_only" and (k, j) == (2, 0):
                    edge = 0, 1, 0, 1
                size = [n // stride for n in x.shape[2:]]
                x = (self.w[i] @ F.unfold(F.pad(x, edge), 3, stride=stride)).unflatten(2, size)
                x, i = self.normed(x, i).clamp(min=0), i + 1
            up = F.pixel_shuffle(torch.einsum("oc,nchw->nohw", self.w[i], x), 2**k)
            seen.append(self.normed(up, i).clamp(min=0))
            i += 1
        x = torch.cat(seen, 1).flatten(2).transpose(1, 2)
        said = torch.split(x @ self.tell[:, :-1].T + self.tell[:, -1], SAID, 2)
        classes, boxes, sides = (y.reshape(len(x), -1, y.shape[2] // pp.TURNS) for y in said)
        if self.fault == "point_pillars_directions_laid_out_before_the_anchors":
            sides = said[2].unflatten(2, (2, pp.TURNS)).transpose(2, 3).flatten(1, 2)
        return classes, boxes, sides


SLOPES = ("input gradient", "weight gradient")
right(task, "point_pillars_of_stages", "a tree, channels last, a split and a fused product", PillarsOfStages)
right(task, "point_pillars_of_packed_matrices", "packed matrices, products of patches", PackedPillars)
wrong(
    task,
    PillarsOfStages,
    point_pillars_centre_taken_at_the_cells_corner=("an offset left out", "vfe"),
    point_pillars_repeated_maximum_detached=("detach", "vfe.pfn_layers.0", SLOPES),
    point_pillars_second_block_norm_by_batch_in_evaluation=("mode", "backbone_2d.blocks.1.5", "eval"),
    point_pillars_last_upsampling_squares_transposed=("a transposed kernel", "backbone_2d.deblocks.2.0"),
)
wrong(
    task,
    PackedPillars,
    point_pillars_second_points_norm_with_the_usual_epsilon=("another epsilon", "vfe.pfn_layers.1.norm"),
    point_pillars_canvas_filled_column_by_column=("exchanged axes", "map_to_bev_module"),
    point_pillars_third_block_padded_after_only=("another padding", "backbone_2d.blocks.2.0"),
    point_pillars_directions_laid_out_before_the_anchors=("another layout", "dense_head"),
)
