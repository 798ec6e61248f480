"""Two ports of a small VoxelMorph: nested floors with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fifth_voxel_morph import INT_STEPS, VxmDense, blobs, both_directions

task = few("thirty_fifth_voxel_morph", VxmDense, blobs, both_directions)


class Band(nn.Module):
    """A convolution of several pictures side by side, [N, H, W, C] each, and its leak."""

    def __init__(self, conv: nn.Conv2d, *widths: int, leak: float = 0.2):
        super().__init__()
        pieces = conv.weight.split(widths or conv.in_channels, 1)
        self.kernels, self.offset = nn.ParameterList(map(leaf, pieces)), leaf(conv.bias)
        self.leak = leak

    def forward(self, *pictures: Tensor) -> Tensor:
        y = sum(map(spatial, pictures, self.kernels)) + self.offset
        return torch.maximum(y, self.leak * y)


class Floor(nn.Module):
    """Goes down, through the floors below, and up again; gives what came up and what stayed."""

    def __init__(self, down: Band, below: nn.Module | None, up: Band):
        super().__init__()
        self.down, self.below, self.up, self.mean = down, below, up, False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stays = self.down(x)
        tiles = stays.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        small = tiles.mean((2, 4)) if self.mean else tiles.amax((2, 4))
        y = self.up(*(self.below(small) if self.below else (small,)))
        return y.repeat_interleave(2, 1).repeat_interleave(2, 2), stays


def look(picture: Tensor, flow: Tensor) -> Tensor:
    """The four pixels around the place to which the flow points, weighted; all [N, H, W, C]."""
    n, high, wide, _ = picture.shape
    row = flow[..., 0] + torch.arange(high).to(flow)[:, None]
    column = flow[..., 1] + torch.arange(wide).to(flow)
    top, left, total = row.detach().floor(), column.detach().floor(), 0
    batch = torch.arange(n, device=flow.device)[:, None, None]
    for i in (top, top + 1):
        for j in (left, left + 1):
            share = (1 - (row - i).abs()) * (1 - (column - j).abs())
            share = share * ((i >= 0) & (i < high) & (j >= 0) & (j < wide))
            place = batch, i.clamp(0, high - 1).long(), j.clamp(0, wide - 1).long()
            total = total + share[..., None] * picture[place]
    return total


def stretch(x: Tensor, times: float) -> Tensor:
    """Resizes [N, H, W, C] between its corners by a matrix for each axis."""
    for axis, old in enumerate(x.shape[1:3], 1):
        places = torch.linspace(0, old - 1, int(old * times), dtype=x.dtype, device=x.device)
        matrix = (1 - (places[:, None] - torch.arange(old).to(x)).abs()).clamp(min=0)
        x = torch.tensordot(matrix, x, ([1], [axis])).movedim(0, axis)
    return times * x


class Doubling(nn.Module):
    """A flow of a small part of the time, doubled some times."""

    def __init__(self):
        super().__init__()
        self.cut, self.steps = None, INT_STEPS

    def forward(self, flow: Tensor) -> Tensor:
        flow = flow * 0.5**self.steps
        for step in range(self.steps):
            further = look(flow, flow)
            flow = (flow.detach() if step == self.cut else flow) + further
        return flow


class FlooredRegistration(Port):
    """Floors within floors, kernels split by what they read, both directions in one batch."""

    def take(self, model: VxmDense) -> None:
        unet, fault = model.unet_model, self.fault
        down, up, rest = [b[0].main for b in unet.encoder], [b[0].main for b in unet.decoder], unet.remaining
        floor, widths = None, ()
        for level in (2, 1, 0):
            leaks = fault == "voxel_morph_second_encoder_leaks_a_hundredth" and level == 1
            first = Band(down[level], leak=0.01 if leaks else 0.2)
            floor = Floor(first, floor, Band(up[2 - level], *widths))
            floor.mean = fault == "voxel_morph_third_pooling_by_the_mean" and level == 2
            widths = up[2 - level].out_channels, down[level].out_channels
        self.floors, self.first, self.second = floor, Band(rest[0].main, *widths), Band(rest[1].main)
        self.head, self.doubling = Band(model.flow, leak=1), Doubling()
        if fault == "voxel_morph_velocity_squared_once_more":
            self.doubling.steps += 1
        if fault == "voxel_morph_third_squaring_detaches_what_it_adds_to":
            self.doubling.cut = 2

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.second(self.first(*self.floors(torch.cat([source, target], 1).movedim(1, 3))))
        speed = stretch(self.head(y), 0.5)
        flows = stretch(self.doubling(torch.cat([speed, -speed])), 2)
        there, back = look(torch.cat([source, target]).movedim(1, 3), flows).movedim(3, 1).chunk(2)
        return there, back, speed.movedim(3, 1)


class PackedRegistration(Port):
    """Three packed weights, products of patches, and places counted from the edges of pixels."""

    def take(self, model: VxmDense) -> None:
        unet = model.unet_model
        self.down, self.down_sizes = self.pack([block[0].main for block in unet.encoder])
        self.up, self.up_sizes = self.pack([block[0].main for block in unet.decoder])
        self.end, self.end_sizes = self.pack([*(block.main for block in unet.remaining), model.flow])

    def pack(self, convs: list[nn.Conv2d]) -> tuple[nn.Parameter, list[tuple[int, int]]]:
        sheets = [torch.cat([c.weight.flatten(1), c.bias[:, None]], 1) for c in convs]
        return leaf(torch.cat([x.flatten() for x in sheets])), [x.shape for x in sheets]

    def unpack(self, weight: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
        pieces = weight.split([rows * columns for rows, columns in sizes])
        return [x.view(size) for x, size in zip(pieces, sizes, strict=True)]

    def patches(self, x: Tensor, sheet: Tensor, turned: bool = False) -> Tensor:
        seen = F.unfold(x, 3, padding=1)
        if turned:
            seen = seen.unflatten(1, (-1, 3, 3)).transpose(2, 3).flatten(1, 3)
        return (sheet[:, :-1] @ seen + sheet[:, -1:]).unflatten(2, x.shape[2:])

    def leaky(self, x: Tensor) -> Tensor:
        return 0.6 * x + 0.4 * x.abs()

    def sample(self, x: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
        (high, wide), kind = x.shape[2:], {"dtype": x.dtype, "device": x.device}
        across = (2 * (torch.arange(wide, **kind) + flow[:, 1]) + 1) / wide - 1
        down = (2 * (torch.arange(high, **kind)[:, None] + flow[:, 0]) + 1) / high - 1
        return F.grid_sample(x, torch.stack([across, down], 3), mode=mode, align_corners=False)

    def integral(self, flow: Tensor) -> Tensor:
        flow = flow / 2**INT_STEPS
        for _ in range(INT_STEPS):
            flow = self.sample(flow, flow) + flow
        times = 1 if self.fault == "voxel_morph_flow_enlarged_but_not_its_values" else 2
        size = [2 * s for s in flow.shape[2:]]
        return times * F.interpolate(flow, size, mode="bilinear", align_corners=True)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, kept = torch.cat([source, target], 1), []
        for sheet in self.unpack(self.down, self.down_sizes):
            kept.append(self.leaky(self.patches(x, sheet)))
            x = F.max_pool2d(kept[-1], 2)
        for i, sheet in enumerate(self.unpack(self.up, self.up_sizes)):
            turned = self.fault == "voxel_morph_second_decoder_kernel_turned" and i == 1
            x = self.leaky(self.patches(x, sheet, turned))
            x = torch.cat([x.repeat_interleave(2, 2).repeat_interleave(2, 3), kept[-1 - i]], 1)
        one, two, head = self.unpack(self.end, self.end_sizes)
        flow = self.patches(self.leaky(self.patches(self.leaky(self.patches(x, one)), two)), head)
        size = [s // 2 for s in flow.shape[2:]]
        speed = F.interpolate(flow / 2, size, mode="bilinear", align_corners=True)
        there = self.integral(speed)
        negated = self.fault == "voxel_morph_way_back_is_the_way_there_negated"
        back = -there if negated else self.integral(-speed)
        nearest = self.fault == "voxel_morph_pictures_by_the_nearest_pixel_in_evaluation"
        mode = "nearest" if nearest and not self.training else "bilinear"
        return self.sample(source, there, mode), self.sample(target, back, mode), speed


SLOPES = ("input gradient", "weight gradient")
right(task, "voxel_morph_of_nested_floors", "a tree, channels last, split kernels", FlooredRegistration)
right(task, "voxel_morph_of_packed_weights", "packed weights, patches, other coordinates", PackedRegistration)
wrong(
    task,
    FlooredRegistration,
    voxel_morph_second_encoder_leaks_a_hundredth=("a slope", "unet_model.encoder.1.0.activation"),
    voxel_morph_third_pooling_by_the_mean=("another pooling", "unet_model"),
    voxel_morph_third_squaring_detaches_what_it_adds_to=("detach", "integrate", SLOPES),
    voxel_morph_velocity_squared_once_more=("a count off by one", "integrate"),
)
wrong(
    task,
    PackedRegistration,
    voxel_morph_second_decoder_kernel_turned=("swapped kernel axes", "unet_model.decoder.1.0.main"),
    voxel_morph_flow_enlarged_but_not_its_values=("a factor left out", "fullsize"),
    voxel_morph_way_back_is_the_way_there_negated=("another inverse", ""),
    voxel_morph_pictures_by_the_nearest_pixel_in_evaluation=("a mode in eval", "transformer", "eval"),
)
