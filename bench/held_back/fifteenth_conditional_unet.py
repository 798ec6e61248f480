"""Two ports of a U-Net that reads a text: cells of fused weights, and nine taps as one product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifteenth_conditional_unet import UNet2DConditionModel, denoising, noised
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_conditional_unet", UNet2DConditionModel, noised, denoising)
TOP, MID = (f"{block}.attentions.0.transformer_blocks.0" for block in ("down_blocks.0", "mid_block"))
TOLD, BOTH = (f"{MID}.attn2", f"{MID}.attn2.to_k", f"{MID}.attn2.to_v"), ("input gradient", "weight gradient")
BENT = tuple(f"down_blocks.1.resnets.0{part}" for part in ("", ".nonlinearity", ".time_emb_proj"))


def parts_of(model: UNet2DConditionModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """The residual blocks and the transformers in the order of their use."""
    blocks = [*model.down_blocks, model.mid_block, *model.up_blocks]
    return [x for b in blocks for x in b.resnets], [x for b in blocks for x in b.attentions]


def joined(layer: nn.Module) -> Tensor:
    """The taps of a layer, each with its channels, row after row, and the bias as the last row."""
    weight = layer.weight.reshape(*layer.weight.shape[:2], -1)
    return torch.cat([weight.permute(2, 1, 0).flatten(0, 1), layer.bias[None]])


def affine(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix[:-1] + matrix[-1]


def waves(steps: Tensor, last: int = 4) -> Tensor:
    angles = steps[:, None] / 10000 ** (torch.arange(4, device=steps.device).double() / last)
    return torch.cat([angles.cos(), angles.sin()], 1)


class Mix(nn.Module):
    def __init__(self, norm: nn.Module, attention: nn.Module):
        super().__init__()
        self.norm, self.heads, self.cached = norm, 2, False
        self.query, self.out = leaf(attention.to_q.weight), attention.to_out[0]
        self.told = leaf(torch.cat([attention.to_k.weight, attention.to_v.weight]))

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        z = self.norm(x)
        told = F.linear(z if source is None else source, self.told)
        rows = (F.linear(z, self.query), *(told.detach() if self.cached else told).chunk(2, -1))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in rows)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        block, (glu, _, last) = model.transformer_blocks[0], model.transformer_blocks[0].ff.net
        self.own, self.text = Mix(block.norm1, block.attn1), Mix(block.norm2, block.attn2)
        self.ends = pile((joined(model.proj_in), joined(model.proj_out)))
        self.value, self.gate = (leaf(half) for half in joined(glu.proj).chunk(2, 1))
        self.norm, self.late_norm, self.last = model.norm, block.norm3, last

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = affine(self.ends[0], self.norm(x).flatten(2).mT)
        y = self.text(self.own(y), text)
        z = self.late_norm(y)
        y = y + self.last(F.gelu(affine(self.gate, z)) * affine(self.value, z))
        return x + affine(self.ends[1], y).mT.unflatten(2, x.shape[2:])


class Cell(nn.Module):
    def __init__(self, block: nn.Module, end: int, reader: nn.Module | None):
        super().__init__()
        self.enter, self.norm = nn.Sequential(block.norm1, nn.SiLU(), block.conv1), block.norm2
        self.rows, self.reader = slice(end - block.conv1.out_channels, end), reader
        ends = [x for x in (block.conv2, block.conv_shortcut) if x is not None]
        self.product = leaf(torch.cat([conv.weight.flatten(1) for conv in ends], 1))
        self.shifts = pile(conv.bias for conv in ends)

    def forward(self, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        y = F.silu(self.norm(self.enter(x) + times[:, self.rows, None, None]))
        y, plain = F.unfold(y, 3, padding=1), len(self.shifts) == 1
        y = self.product @ (y if plain else torch.cat([y, x.flatten(2)], 1)) + self.shifts.sum(0)[:, None]
        y = y.unflatten(2, x.shape[2:]) + (x if plain else 0)
        return y if self.reader is None else self.reader(y, text)


class CellsInARow(Port):
    def take(self, model: UNet2DConditionModel) -> None:
        nets, looks = parts_of(model)
        look, deep, early, late = (Reader(x) for x in looks)
        readers = (look, None, deep, None, None, None, early, late)
        ends = torch.tensor([net.conv1.out_channels for net in nets]).cumsum(0).tolist()
        self.cells = nn.ModuleList(map(Cell, nets, ends, readers))
        self.enter, self.shrink = model.conv_in, model.down_blocks[0].downsamplers[0].conv
        self.grow = nn.Sequential(nn.Upsample(scale_factor=2), model.up_blocks[0].upsamplers[0].conv)
        self.head = nn.Sequential(model.conv_norm_out, nn.SiLU(), model.conv_out)
        self.clock = nn.Sequential(*model.time_embedding, nn.SiLU())
        self.times = leaf(torch.cat([joined(net.time_emb_proj) for net in nets], 1))
        deep.own.heads = 3 if self.fault == "condunet_mid_self_attention_in_heads_of_four" else 2
        deep.text.cached = self.fault == "condunet_mid_text_keys_and_values_cached_without_gradient"

    def forward(self, x: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        last = 3 if self.fault == "condunet_time_frequencies_reach_their_end" else 4
        times = affine(self.times, self.clock(waves(steps, last).to(x)))
        a = self.enter(x)
        b = self.cells[0](a, times, text)
        c = self.shrink(b)
        d = self.cells[1](c, times, text)
        x = self.cells[3](self.cells[2](d, times, text), times, text)
        kept = [b, a, c, d] if self.fault == "condunet_last_up_block_swaps_its_two_skips" else [a, b, c, d]
        for i, cell in enumerate(self.cells[4:]):
            x = cell(torch.cat([x, kept.pop()], 1), times, text)
            x = self.grow(x) if i == 1 else x
        return self.head(x)


class NineTaps(Port):
    def take(self, model: UNet2DConditionModel) -> None:
        nets, looks = parts_of(model)
        blocks = [look.transformer_blocks[0] for look in looks]
        self.sided = [i for i, net in enumerate(nets) if net.conv_shortcut is not None]
        layers = [x for net in nets for x in (net.conv1, net.conv2, net.time_emb_proj)]
        layers += [y for x in looks for y in (x.proj_in, x.proj_out)]
        layers += [y for b in blocks for y in (b.ff.net[0].proj, b.ff.net[2])]
        layers += [model.conv_in, model.conv_out, model.time_embedding[0], model.time_embedding[2]]
        layers += [model.down_blocks[0].downsamplers[0].conv, model.up_blocks[0].upsamplers[0].conv]
        layers += [nets[i].conv_shortcut for i in self.sided]
        self.layers = nn.ParameterList(leaf(joined(x)) for x in layers)
        norms = [x for net in nets for x in (net.norm1, net.norm2)] + [x.norm for x in looks]
        norms += [model.conv_norm_out, *(x for b in blocks for x in (b.norm1, b.norm2, b.norm3))]
        self.norms = nn.ParameterList(pile((x.weight, x.bias)) for x in norms)
        mixes = [x for b in blocks for x in (b.attn1, b.attn2)]
        sides = [((x.to_q.weight.T, x.to_out[0].weight), (x.to_k.weight.T, x.to_v.weight.T)) for x in mixes]
        self.sides = nn.ParameterList(pile(pair) for side in sides for pair in side)
        self.shifts = nn.ParameterList(leaf(x.to_out[0].bias) for x in mixes)

    def conv(self, i: int, x: Tensor, pace: int = 1) -> Tensor:
        (high, wide), x = x.shape[1:3], F.pad(x, (0, 0, 1, 1, 1, 1))
        taps = [x[:, i : i + high : pace, j : j + wide : pace] for i in range(3) for j in range(3)]
        return affine(self.layers[i], torch.cat(taps, 3))

    def group(self, i: int, x: Tensor, eps: float = 1e-5) -> Tensor:
        less = int(i == 9 and self.fault == "condunet_first_up_norm_by_the_sample_variance")
        y, (gain, shift) = x.unflatten(3, (4, -1)), self.norms[i]
        spread, center = torch.var_mean(y, (1, 2, 4), correction=less, keepdim=True)
        return ((y - center) * (spread + eps).rsqrt()).flatten(3) * gain + shift

    def residual(self, i: int, time: Tensor, *images: Tensor) -> Tensor:
        x = torch.cat(images, 3)
        bare = i == 1 and self.fault == "condunet_second_down_block_projects_the_time_unbent"
        y = self.conv(3 * i, F.silu(self.group(2 * i, x)))
        y = y + affine(self.layers[3 * i + 2], time if bare else F.silu(time))[:, None, None]
        y = self.conv(3 * i + 1, F.silu(self.group(2 * i + 1, y)))
        return y + (affine(self.layers[46 + self.sided.index(i)], x) if i in self.sided else x)

    def mix(self, i: int, x: Tensor, source: Tensor) -> Tensor:
        (q, out), (k, v) = (self.sides[j].unflatten(2, (2, -1)) for j in (2 * i, 2 * i + 1))
        form = torch.einsum("chd,ehd->hce", q, k) * q.shape[-1] ** -0.5
        share = torch.einsum("nqc,hce,nke->nhqk", x, form, source).softmax(-1)
        return torch.einsum("nhqk,nke,ehd,ohd->nqo", share, source, v, out) + self.shifts[i]

    def read(self, i: int, x: Tensor, text: Tensor) -> Tensor:
        enter, leave, glu, last = (self.layers[j + 2 * i] for j in (24, 25, 32, 33))
        norms, z = [self.norms[j + 3 * i] for j in (21, 22, 23)], self.group(16 + i, x, 1e-6)
        third = 1 if i == 0 and self.fault == "condunet_first_feed_forward_after_the_text_norm" else 2
        y = affine(enter, z.flatten(1, 2))
        own, width = F.layer_norm(y, y.shape[2:], *norms[0]), y.shape[2:]
        y = y + self.mix(2 * i, own, own)
        y = y + self.mix(2 * i + 1, F.layer_norm(y, width, *norms[1]), text)
        value, gate = affine(glu, F.layer_norm(y, width, *norms[third])).chunk(2, 2)
        y = affine(leave, y + affine(last, value * F.gelu(gate))).unflatten(1, x.shape[1:3])
        return y + (z if i == 3 and self.fault == "condunet_last_transformer_around_its_norm" else x)

    def forward(self, x: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        time = affine(self.layers[43], F.silu(affine(self.layers[42], waves(steps).to(x))))
        a = self.conv(40, x.movedim(1, 3))
        b = self.read(0, self.residual(0, time, a), text)
        c = self.conv(44, b, 2)
        d = self.residual(1, time, c)
        x = self.residual(3, time, self.read(1, self.residual(2, time, d), text))
        x = self.residual(5, time, self.residual(4, time, x, d), c)
        x = self.conv(45, x.repeat_interleave(2, 1).repeat_interleave(2, 2))
        x = self.read(3, self.residual(7, time, self.read(2, self.residual(6, time, x, b), text), a), text)
        return self.conv(41, F.silu(self.group(20, x))).movedim(3, 1)


right(task, "condunet_of_cells_with_fused_products", "a row of cells", CellsInARow)
right(task, "condunet_by_nine_taps_side_by_side", "channels last, one product a convolution", NineTaps)
wrong(
    task,
    CellsInARow,
    condunet_time_frequencies_reach_their_end=("another exponent of the frequencies", "time_proj"),
    condunet_mid_self_attention_in_heads_of_four=("another number of heads", f"{MID}.attn1"),
    condunet_last_up_block_swaps_its_two_skips=("skips in the wrong order", ("up_blocks.1", "")),
    condunet_mid_text_keys_and_values_cached_without_gradient=("a cut graph", TOLD, BOTH),
)
wrong(
    task,
    NineTaps,
    condunet_second_down_block_projects_the_time_unbent=("an activation left out", BENT),
    condunet_first_up_norm_by_the_sample_variance=("the unbiased variance", "up_blocks.0.resnets.0.norm2"),
    condunet_last_transformer_around_its_norm=("a residual taken too late", "up_blocks.1.attentions.1"),
    condunet_first_feed_forward_after_the_text_norm=("another layer's weights", (f"{TOP}.norm3", TOP)),
)
