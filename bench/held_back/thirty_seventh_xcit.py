"""Two ports of a small XCiT: a tree over grids with the channels last, and flat code over packed columns."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_seventh_xcit import HEADS, WAVES, XCiT, smoothed, stripes

task = few("thirty_seventh_xcit", XCiT, stripes, smoothed)


class Places(nn.Module):
    def __init__(self, layer: nn.Conv2d, first: int):
        super().__init__()
        self.maps, self.offset, self.first = pile(layer.weight[..., 0, 0].T.chunk(2)), leaf(layer.bias), first

    def forward(self, x: Tensor) -> Tensor:
        rate, added = torch.exp(-math.log(10000) * 2 / WAVES * torch.arange(WAVES // 2).to(x)), []
        for count, weight in zip(x.shape[1:3], self.maps, strict=True):
            turns = (torch.arange(count).to(x) + self.first) / (count + 1e-6)
            angle = 2 * math.pi * turns[:, None] * rate
            added.append(torch.stack([angle.sin(), angle.cos()], -1).flatten(1) @ weight)
        return x + added[0][:, None] + added[1] + self.offset


class Branches(nn.Module):
    def __init__(self, block: nn.Module, held: bool, late: bool):
        super().__init__()
        (inner, near), self.held, self.late = (block.attn, block.local_mp), held, late
        self.level, self.close, self.rows = block.norm1, inner.proj, Rows(near.bn)
        self.maps, self.shifts = pile(x.T for x in inner.qkv.weight.chunk(3)), pile(inner.qkv.bias.chunk(3))
        self.sharp, self.gains = leaf(inner.temperature), pile((block.gamma1, block.gamma3, block.gamma2))
        self.taps = pile(x.weight[:, 0].permute(1, 2, 0) for x in (near.conv1, near.conv2))
        self.offsets, self.middle = pile((near.conv1.bias, near.conv2.bias)), block.norm3
        self.feed = nn.Sequential(block.norm2, *block.mlp.children())

    def across(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ self.maps[i] + self.shifts[i]).unflatten(2, (HEADS, -1)) for i in range(3))
        long = q.square().sum(1).sqrt()[..., None] * k.square().sum(1).sqrt()[:, :, None]
        like = torch.einsum("nthi,nthj->nhij", q, k) / (long.detach() if self.held else long)
        return self.close(torch.einsum("nhij,nthj->nthi", F.softmax(like * self.sharp, 3), v).flatten(2))

    def tap(self, x: Tensor, i: int) -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        return torch.einsum("nhwcij,ijc->nhwc", windows, self.taps[i]) + self.offsets[i]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.level(x).flatten(1, 2)).view_as(x) * self.gains[0]
        y = self.tap(self.middle(x), 0)
        y = F.gelu(self.rows(y)) if self.late else self.rows(F.gelu(y))
        x = x + self.tap(y, 1) * self.gains[1]
        return x + self.feed(x) * self.gains[2]


class Summary(nn.Module):
    def __init__(self, block: nn.Module, width: int):
        super().__init__()
        inner, self.width = block.attn, width
        self.before, self.after, self.feed = block.norm1, block.norm2, nn.Sequential(*block.mlp.children())
        self.ask, self.close, self.gains = inner.q, inner.proj, pile((block.gamma1, block.gamma2))
        self.map = leaf(torch.cat([inner.k.weight, inner.v.weight]).T)
        self.offset = leaf(torch.cat([inner.k.bias, inner.v.bias]))

    def forward(self, one: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        first, others = self.before(one), self.before(rest)
        q = self.ask(first).unflatten(1, (HEADS, -1)) / math.sqrt(self.width)
        both = torch.cat([others, first[:, None]], 1) @ self.map + self.offset
        k, v = both.unflatten(2, (2, HEADS, -1)).unbind(2)
        share = torch.einsum("nhd,nthd->nht", q, k).softmax(2)
        found = self.close(torch.einsum("nht,nthd->nhd", share, v).flatten(1))
        one = self.after(one + self.gains[0] * found)
        return one + self.gains[1] * self.feed(one), 2 * self.after(rest + self.gains[0] * others)


class XcitOfGrids(Port):
    def take(self, model: XCiT) -> None:
        fault, wide, stem = self.fault, len(model.norm.weight), model.patch_embed.proj[::2]
        self.kernels = nn.ParameterList(leaf(x[0].weight) for x in stem)
        self.norms = nn.ModuleList(Rows(x[1]) for x in stem)
        first = 0 if fault == "xcit_rows_and_columns_counted_from_zero" else 1
        layers, self.summary = [Places(model.pos_embed.token_projection, first)], nn.ModuleList()
        for i, block in enumerate(model.blocks):
            held = fault == "xcit_second_block_holds_the_lengths_of_queries_and_keys" and i == 1
            late = fault == "xcit_third_local_interaction_norms_before_its_gelu" and i == 2
            layers.append(Branches(block, held, late))
        for i, block in enumerate(model.cls_attn_blocks):
            whole = fault == "xcit_last_class_attention_scaled_by_the_whole_width" and i == 1
            self.summary.append(Summary(block, wide if whole else wide // HEADS))
        self.body, self.label = nn.Sequential(*layers), leaf(model.cls_token[0])
        self.tell = nn.Sequential(model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        for i, kernel in enumerate(self.kernels):
            x = self.norms[i](spatial(F.gelu(x) if i else x.movedim(1, 3), kernel, None, 2))
        one, rest = self.label.expand(len(x), -1), self.body(x).flatten(1, 2)
        for part in self.summary:
            one, rest = part(one, rest)
        return self.tell(one)


def sheet(*layers: nn.Module) -> Tensor:
    return torch.cat([x.reshape(len(x), -1) for layer in layers for x in layer.parameters()], 1)


def level(x: Tensor, pair: Tensor, eps: float = 1e-6) -> Tensor:
    x = x - x.mean(1, True)
    return x / (x.square().mean(1, True) + eps).sqrt() * pair[:, :1] + pair[:, 1:]


def through(sheet: Tensor, x: Tensor) -> Tensor:
    return sheet[:, :-1] @ x + sheet[:, -1:]


class PackedXcit(Port):
    """Columns of tokens, [N, C, T], and sheets of weights by the kind of the block."""

    def take(self, model: XCiT) -> None:
        stem, ends = model.patch_embed.proj[::2], (model.pos_embed.token_projection, model.norm, model.head)
        norms = [*(x[1] for x in stem), *(x.local_mp.bn for x in model.blocks)]
        self.stem = nn.ParameterList(leaf(sheet(x[0], x[1])) for x in stem)
        self.place, self.final, self.head = (leaf(sheet(x)) for x in ends)
        self.label, self.w = leaf(model.cls_token[0].T), nn.ParameterList()
        self.sharp = pile(x.attn.temperature for x in model.blocks)
        self.gains = pile(torch.stack([x.gamma1, x.gamma2, x.gamma3]) for x in model.blocks)
        self.class_gains = pile(torch.stack([x.gamma1, x.gamma2]) for x in model.cls_attn_blocks)
        for x in (*model.blocks, *model.cls_attn_blocks):
            a, near = x.attn, getattr(x, "local_mp", None)
            mix = sheet(a.qkv) if near else torch.cat([sheet(a.q), sheet(a.k), sheet(a.v)])
            more = (x.norm3, near.conv1, near.conv2, near.bn) if near else ()
            inner = map(sheet, (a.proj, x.mlp.fc1, x.mlp.fc2))
            self.w.extend(map(leaf, (mix, *inner, sheet(x.norm1, x.norm2, *more))))
        for i, x in enumerate(norms):
            self.register_buffer(f"seen_{i}", torch.stack([x.running_mean, x.running_var]))
        self.register_buffer("count", torch.stack([x.num_batches_tracked for x in norms]))

    def rows(self, x: Tensor, i: int, pair: Tensor) -> Tensor:
        fast = self.fault == "xcit_second_stem_norm_takes_nine_tenths_of_the_new" and i == 1
        self.count[i] += self.training
        return F.batch_norm(x, *getattr(self, f"seen_{i}"), *pair.T, self.training, 0.9 if fast else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        fault, (h, w) = self.fault, x.shape[2:]
        for i, s in enumerate(self.stem):
            h, w, x = h // 2, w // 2, F.unfold(F.gelu(x) if i else x, 3, padding=1, stride=2)
            x = self.rows(s[:, :-2] @ x, i, s[:, -2:]).unflatten(2, (h, w))
        rate = 10000 ** (-torch.arange(0, WAVES, 2).to(x) / WAVES)[:, None]
        turns = (2 * math.pi * rate * torch.arange(1, n + 1).to(x) / (n + 1e-6) for n in (h, w))
        y, z = (torch.stack([a.sin(), a.cos()], 1).flatten(0, 1) for a in turns)
        x = x.flatten(2) + through(self.place, torch.cat([y.repeat_interleave(w, 1), z.repeat(1, h)]))
        for i in range(len(self.gains)):
            (mix, out, up, down, c), gains = self.w[5 * i : 5 * i + 5], self.gains[i, :, :, None]
            if fault == "xcit_first_block_numbers_its_scales_in_order" and i == 0:
                gains = gains[[0, 2, 1]]
            q, k, v = through(mix, level(x, c[:, :2])).unflatten(1, (3, HEADS, -1)).unbind(1)
            q, k = (a * a.square().sum(3, True).rsqrt() for a in (q, k))
            y = (((k @ q.mT) * self.sharp[i]).softmax(2).mT @ v).flatten(1, 2)
            x = x + gains[0] * through(out, y)
            y = level(x, c[:, 4:6]).unflatten(2, (h, w))
            y = F.conv2d(y, c[:, 6:15].view(-1, 1, 3, 3), c[:, 15], padding=1, groups=len(c))
            y = self.rows(F.gelu(y).flatten(2), 3 + i, c[:, 26:]).unflatten(2, (h, w))
            y = F.conv2d(y, c[:, 16:25].view(-1, 1, 3, 3), c[:, 25], padding=1, groups=len(c))
            x = x + gains[2] * y.flatten(2)
            x = x + gains[1] * through(down, F.gelu(through(up, level(x, c[:, 2:4]))))
        x = torch.cat([x, self.label.expand(len(x), -1, 1)], 2)
        for i, gains in enumerate(self.class_gains[..., None]):
            mix, out, up, down, c = self.w[-10:][5 * i : 5 * i + 5]
            q, k, v = through(mix, y := level(x, c[:, :2])).unflatten(1, (3, HEADS, -1)).unbind(1)
            q = (k.mT @ q[..., -1:] / q.shape[2] ** 0.5).softmax(2)
            still = fault == "xcit_first_class_block_leaves_the_patches_unmixed" and i == 0
            y = torch.cat([y[..., :-1] * (not still), through(out, (v @ q).flatten(1, 2))], 2)
            x = level(x + gains[0] * y, c[:, 2:])
            x = x + torch.cat([x[..., :-1], gains[1] * through(down, F.gelu(through(up, x[..., -1:])))], 2)
        eps = 1e-3 if fault == "xcit_last_norm_with_an_eps_of_a_thousandth" else 1e-6
        return through(self.head, level(x[..., -1:], self.final, eps)).flatten(1)


SLOPES = ("input gradient", "weight gradient")
right(task, "xcit_of_grids_with_channels_last", "a tree, branches with scales, split weights", XcitOfGrids)
right(task, "xcit_of_packed_columns", "packed sheets, products of columns, loops", PackedXcit)
wrong(
    task,
    XcitOfGrids,
    xcit_rows_and_columns_counted_from_zero=("a count off by one", "pos_embed"),
    xcit_second_block_holds_the_lengths_of_queries_and_keys=("detach", "blocks.1.attn", SLOPES),
    xcit_third_local_interaction_norms_before_its_gelu=("another order", "blocks.2.local_mp"),
    xcit_last_class_attention_scaled_by_the_whole_width=("another scale", "cls_attn_blocks.1.attn"),
)
wrong(
    task,
    PackedXcit,
    xcit_second_stem_norm_takes_nine_tenths_of_the_new=("momentum", "patch_embed.proj.2.1", "buffer"),
    xcit_first_block_numbers_its_scales_in_order=("swapped weights", "blocks.0"),
    xcit_first_class_block_leaves_the_patches_unmixed=("a term left out", "cls_attn_blocks.0"),
    xcit_last_norm_with_an_eps_of_a_thousandth=("eps", "norm"),
)
