"""Two ports of a small SegNeXt: a tree with the channels last, and one class of sheets of weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_seventh_seg_next import DEPTHS, DIMS, HAM, EncoderDecoder, by_pixel, scenes

task = few("twenty_seventh_seg_next", EncoderDecoder, scenes, by_pixel)


def factored(x: Tensor, bases: Tensor, turns: int, held: bool = False) -> Tensor:
    """[N, P, C] as a product of shares [N, P, R] and bases [N, R, C], which are fitted in turn."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not held):
        share = (x @ bases.mT).softmax(2)
        for _ in range(turns):
            share = share * (x @ bases.mT / (share @ (bases @ bases.mT) + 1e-6))
            bases = bases * (share.mT @ x / (share.mT @ share @ bases + 1e-6))
    return share * (x @ bases.mT / (share @ (bases @ bases.mT) + 1e-6)) @ bases


def dense(conv: nn.Conv2d) -> nn.Linear:
    layer = nn.Linear(*conv.weight.shape[1::-1], conv.bias is not None)
    return filled(layer, conv.weight[..., 0, 0], conv.bias)


class Windows(nn.Module):
    """A convolution of [N, H, W, C], of all channels at once or of each by its own taps."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.taps, self.bias, self.step = leaf(conv.weight.squeeze(1)), leaf(conv.bias), conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        high, wide = self.taps.shape[-2:]
        x = F.pad(x, (0, 0, wide // 2, wide // 2, high // 2, high // 2)).unfold(1, high, self.step)
        letters = "nhwcij,cij->nhwc" if self.taps.ndim == 3 else "nhwcij,ocij->nhwo"
        return torch.einsum(letters, x.unfold(2, wide, self.step), self.taps) + self.bias


class Cell(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        attn, mlp, unit = block.attn, block.mlp, block.attn.spatial_gating_unit
        self.one, self.two, self.closed = Rows(block.norm1), Rows(block.norm2), False
        self.scales = pile((block.layer_scale_1, block.layer_scale_2))
        layers = attn.proj_1, unit.conv3, attn.proj_2, mlp.fc1, mlp.fc2
        self.enter, self.mix, self.leave, self.up, self.down = map(dense, layers)
        pairs = ((unit.get_submodule(f"conv{i}_{j}") for j in (1, 2)) for i in range(3))
        self.strips = nn.ModuleList(nn.Sequential(*map(Windows, pair)) for pair in pairs)
        self.near, self.around = Windows(unit.conv0), Windows(mlp.dwconv)

    def forward(self, x: Tensor) -> Tensor:
        rows, (first, second) = self.one(x), self.scales
        kept = F.gelu(self.enter(rows))
        near = self.near(kept)
        gate = self.mix(sum((strip(near) for strip in self.strips), near))
        x = x + first * rows + first * self.leave(gate * (kept.detach() if self.closed else kept))
        return torch.addcmul(x, second, self.down(F.gelu(self.around(self.up(self.two(x))))))


class SegNextOfCells(Port):
    """Stages of cells, channels last; the head squeezes each stage before it is resized."""

    def take(self, model: EncoderDecoder) -> None:
        net, head, ham = model.backbone, model.decode_head, model.decode_head.hamburger
        stem, self.stages = net.patch_embed1.proj, nn.ModuleList()
        self.first = nn.Sequential(Windows(stem[0]), Rows(stem[1]))
        ends = (stem[3:], net.patch_embed2.children(), net.patch_embed3.children())
        for i, (conv, norm) in enumerate(ends, 1):
            cells, top = map(Cell, net.get_submodule(f"block{i}")), net.get_submodule(f"norm{i}")
            self.stages.append(nn.Sequential(Windows(conv), Rows(norm), *cells, top))
        self.squeezes = nn.ParameterList(map(leaf, head.squeeze.conv.weight.flatten(1).split(DIMS, 1)))
        convs = ham.ham_in.conv, ham.ham_out.conv, head.align.conv, head.conv_seg
        self.enter, self.leave, self.align, self.tell = map(dense, convs)
        self.flocks = nn.ModuleList(x.gn for x in (head.squeeze, ham.ham_out, head.align))
        self.register_buffer("bases", ham.ham.bases.mT.clone())
        self.stages[0][3].closed = self.fault == "seg_next_second_block_gates_a_constant"

    def forward(self, x: Tensor) -> Tensor:
        formula = "tanh" if self.fault == "seg_next_stem_gelu_by_tanh" else "none"
        x, found, size = F.gelu(self.first(x.movedim(1, 3)), approximate=formula), 0, None
        for i, stage in enumerate(self.stages):
            x = stage(x)
            size, eyes = size or x.shape[1:3], (torch.eye(n).to(x)[None] for n in x.shape[1:3])
            far = i == 2 and self.fault == "seg_next_last_stage_resized_with_aligned_corners"
            pairs = zip(eyes, size, strict=True)
            down, across = (F.interpolate(*pair, mode="linear", align_corners=far)[0] for pair in pairs)
            found = found + torch.einsum("nhwc,oc,hH,wW->noHW", x, self.squeezes[i], down, across)
        x = self.flocks[0](found).relu().movedim(1, 3)
        fewer = self.training or self.fault == "seg_next_hamburger_stops_early_in_evaluation"
        ham = factored(self.enter(x).relu().flatten(1, 2), self.bases, 3 if fewer else 4).view_as(x)
        x = (x + self.flocks[1](self.leave(ham).movedim(3, 1)).movedim(1, 3)).relu()
        x = self.flocks[2](self.align(x).movedim(3, 1)).relu()
        return self.tell(x.movedim(1, 3)).movedim(3, 1)


def sheet(*layers: nn.Module | Tensor) -> Tensor:
    """A row for each channel: all its weights of these layers, one after the other."""
    values = (x.parameters() if isinstance(x, nn.Module) else [x] for x in layers)
    return torch.cat([x.reshape(len(x), -1) for each in values for x in each], 1)


def patches(x: Tensor, rows: Tensor, high: int = 1, wide: int = 1, step: int = 1) -> Tensor:
    """A convolution as products of patches, in as many groups as the rows are short."""
    seen = F.unfold(x, (high, wide), padding=(high // 2, wide // 2), stride=step)
    groups = seen.shape[1] // (rows.shape[1] - 1)
    rows, seen = rows.unflatten(0, (groups, -1)), seen.unflatten(1, (groups, -1))
    y = torch.einsum("gok,ngkp->ngop", rows[..., :-1], seen) + rows[..., -1:]
    return y.flatten(1, 2).unflatten(2, (-1, (x.shape[3] - 1) // step + 1))


class SheetedSegNext(Port):
    """Two stacks of sheets for the blocks of each stage, and a sheet for whatever else has as many rows."""

    def take(self, model: EncoderDecoder) -> None:
        net, head = model.backbone, model.decode_head
        stem, self.w = net.patch_embed1.proj, nn.ParameterList()
        ends = stem[:2], stem[3:], net.patch_embed2, net.patch_embed3
        self.w.extend(leaf(sheet(end)) for end in ends)
        for blocks in (net.block1, net.block2, net.block3):
            order = [(x.norm1, x.attn, x.layer_scale_1, x.norm2, x.mlp.fc2, x.layer_scale_2) for x in blocks]
            self.w.append(pile(sheet(*each) for each in order))
            self.w.append(pile(sheet(x.mlp.fc1, x.mlp.dwconv) for x in blocks))
        ends = net.norm1, net.norm2, net.norm3, head.align, head.conv_seg
        self.w.extend([*(leaf(sheet(x)) for x in ends), leaf(sheet(head.squeeze, head.hamburger))])
        self.register_buffer("bases", head.hamburger.ham.bases.mT.clone())
        norms = [x for x in net.modules() if isinstance(x, nn.BatchNorm2d)]
        for i, x in enumerate(norms):
            self.register_buffer(f"seen_{i}", torch.stack([x.running_mean, x.running_var]))

    def even(self, i: int, x: Tensor, rows: Tensor) -> Tensor:
        seen = self.get_buffer(f"seen_{i}")
        return F.batch_norm(x, *seen, *rows.T.contiguous(), self.training, 0.1, 1e-5)

    def end(self, i: int, x: Tensor) -> Tensor:
        rows, norm = self.w[i].tensor_split([-2], 1)
        return self.even((0, 1, 6, 11)[i], patches(x, rows, 3, 3, 2), norm)

    def block(self, i: int, j: int, x: Tensor) -> Tensor:
        wide, high, c, first = self.w[4 + 2 * i][j], self.w[5 + 2 * i][j], DIMS[i] + 1, 2 + 5 * i + 2 * j
        sizes = (2, c, 26, 8, 8, 12, 12, 22, 22, c, c, 1, 2, len(high) + 1, 1)
        norm, enter, near, *strips, mix, leave, one, again, down, two = wide.split(sizes, 1)
        rows = self.even(first, x, norm)
        y = F.gelu(patches(rows, enter))
        gate = start = patches(y, near, 5, 5)
        for k, size in enumerate((7, 11, 21)):
            skips = (i, j, k) == (1, 0, 1) and self.fault == "seg_next_middle_strips_skip_the_first_window"
            strip = patches(y if skips else start, strips[2 * k], 1, size)
            gate = gate + patches(strip, strips[2 * k + 1], size)
        x = x + one[:, :, None] * (rows + patches(y * patches(gate, mix), leave))
        y = patches(self.even(first + 1, x, again), high[:, :c])
        soon = i == 2 and self.fault == "seg_next_last_mlp_bends_before_its_window"
        y = patches(F.gelu(y) if soon else y, high[:, c:], 3, 3)
        return x + two[:, :, None] * patches(y if soon else F.gelu(y), down)

    def flock(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x, rows[:, :-2, None, None]), 4, *rows[:, -2:].T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        x, found, (*tops, align, tell, middle) = F.gelu(self.end(0, x)), [], self.w[10:]
        for i, depth in enumerate(DEPTHS):
            x = self.end(i + 1, x)
            for j in range(depth):
                x = self.block(i, j, x)
            less = int(i == 1 and self.fault == "seg_next_second_norm_divides_by_one_fewer")
            spread, center = torch.var_mean(x, 1, correction=less, keepdim=True)
            x = (x - center) * torch.rsqrt(spread + 1e-5) * tops[i][:, :1, None] + tops[i][:, 1:, None]
            found.append(F.interpolate(x, (found or [x])[0].shape[2:], mode="bilinear"))
        squeeze, enter, leave = middle.split((sum(DIMS) + 2, HAM + 1, HAM + 2), 1)
        x, held = self.flock(torch.cat(found, 1), squeeze).relu(), self.fault == HELD
        pixels = patches(x, enter).relu().flatten(2).mT
        ham = factored(pixels, self.bases, 3 if self.training else 4, held).mT.reshape(x.shape)
        return patches(self.flock((x + self.flock(ham, leave)).relu(), align).relu(), tell)


HELD = "seg_next_hamburger_fits_without_gradient"
SLOPES, UNIT = ("input gradient", "weight gradient"), "attn.spatial_gating_unit"
right(task, "seg_next_of_cells_channels_last", "a tree, channels last", SegNextOfCells, other="bug")
right(task, "seg_next_of_sheets", "packed sheets, products of patches", SheetedSegNext, other="bug")
wrong(
    task,
    SegNextOfCells,
    seg_next_stem_gelu_by_tanh=("another function", "backbone.patch_embed1.proj.2"),
    seg_next_second_block_gates_a_constant=("detach", f"backbone.block1.1.{UNIT}", SLOPES),
    seg_next_last_stage_resized_with_aligned_corners=("aligned corners", "decode_head"),
    seg_next_hamburger_stops_early_in_evaluation=("a count in eval", "decode_head.hamburger.ham", "eval"),
)
wrong(
    task,
    SheetedSegNext,
    seg_next_middle_strips_skip_the_first_window=("wrong input", f"backbone.block2.0.{UNIT}"),
    seg_next_last_mlp_bends_before_its_window=("another order", "backbone.block3.0.mlp"),
    seg_next_second_norm_divides_by_one_fewer=("another variance", "backbone.norm2"),
    seg_next_hamburger_fits_without_gradient=("no_grad", "decode_head.hamburger.ham", SLOPES),
)
