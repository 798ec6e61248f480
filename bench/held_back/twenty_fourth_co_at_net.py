"""Two ports of a small CoAtNet: a tree of ways and paths with the channels last, and one class of strips."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fourth_co_at_net import MaxxVit, flowers, smoothed_classes

task = few("twenty_fourth_co_at_net", MaxxVit, flowers, smoothed_classes)


def dense(layer: nn.Module) -> nn.Module:
    """The same layer norm, or product, of each pixel's channels, which are last."""
    weight = layer.weight.flatten(1) if layer.weight.ndim > 1 else layer.weight
    if isinstance(layer, nn.LayerNorm):
        return filled(nn.LayerNorm(len(weight), layer.eps), weight, layer.bias)
    return filled(nn.Linear(*weight.T.shape, bias=layer.bias is not None), weight, layer.bias)


class Windows(nn.Module):
    """A convolution of [N, H, W, C], three by three, with ``near`` of its two edges before the pixels."""

    def __init__(self, conv: nn.Conv2d, near: int = 1):
        super().__init__()
        self.weight, self.stride = leaf(conv.weight.movedim(0, 3)), conv.stride[0]
        self.edges = 0, 0, near, 2 - near, near, 2 - near
        self.product = "nhwcij,cijo->nhwo" if conv.groups == 1 else "nhwcij,bijc->nhwc"

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.edges).unfold(1, 3, self.stride).unfold(2, 3, self.stride)
        return torch.einsum(self.product, x, self.weight)


class Beside(nn.Module):
    """What a path adds to a way: the pixels as they are, or widened and then halved."""

    def __init__(self, shortcut: nn.Module, *path: nn.Module):
        super().__init__()
        way = [] if isinstance(shortcut, nn.Identity) else [dense(shortcut.expand), nn.AvgPool3d((2, 2, 1))]
        self.way, self.path = nn.Sequential(*way), nn.Sequential(*path)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x) + self.path(x)


class Gated(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean((1, 2), keepdim=True)) * x


class Mixed(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.heads, self.rate, self.late = attn.num_heads, attn.dim_head**0.5, False
        rows = torch.cat([attn.qkv.weight.flatten(1), attn.qkv.bias[:, None]], 1)
        rows = rows.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        maps = (filled(nn.Linear(row.shape[1] - 1, len(row)), row[:, :-1], row[:, -1]) for row in rows)
        self.looks, self.back = nn.ModuleList(maps), dense(attn.proj)
        table = attn.rel_pos.relative_position_bias_table
        self.table, (high, wide) = leaf(table.flatten(1)), table.shape[1:]
        place = (torch.arange(high // 2 + 1)[:, None] * wide + torch.arange(wide // 2 + 1)).flatten()
        self.register_buffer("place", place - place[:, None] + table[0].numel() // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (look(x.flatten(1, 2)).unflatten(2, (self.heads, -1)) for look in self.looks)
        scores, bias = torch.einsum("nqhd,nkhd->nhqk", q, k), self.table[:, self.place]
        scores = (scores + bias) / self.rate if self.late else scores / self.rate + bias
        return self.back(torch.einsum("nhqk,nkhd->nqhd", scores.softmax(3), v).reshape(*x.shape[:3], -1))


def local(block: nn.Module, early: bool = False) -> Beside:
    """An MBConv block; ``early``: it is gated before its last norm."""
    norm, gate = [Rows(block.norm2), nn.GELU()], [dense(block.se.fc1), nn.SiLU(), dense(block.se.fc2)]
    last = [Gated(*gate, nn.Sigmoid()), *norm] if early else [*norm, Gated(*gate, nn.Sigmoid())]
    first = Rows(block.pre_norm), dense(block.conv1_1x1), Rows(block.norm1), nn.GELU()
    return Beside(block.shortcut, *first, Windows(block.conv2_kxk), *last, dense(block.conv3_1x1))


def whole(block: nn.Module) -> tuple[Beside, Beside]:
    """The two halves of a transformer block."""
    norm = [dense(getattr(block.norm1, "norm", block.norm1)), nn.AvgPool3d((2, 2, 1))]
    norm = norm if hasattr(block.norm1, "down") else norm[:1]
    mlp = dense(block.norm2), dense(block.mlp.fc1), nn.GELU(), dense(block.mlp.fc2)
    return Beside(block.shortcut, *norm, Mixed(block.attn)), Beside(nn.Identity(), *mlp)


class CoAtNetOfWays(Port):
    """One row of ways and paths, channels last, and a head at its end."""

    def take(self, model: MaxxVit) -> None:
        stem, head, fault = model.stem, model.head, self.fault
        near = 0 if fault == "co_at_net_stem_padded_on_the_far_side_only" else 1
        self.stem = nn.Sequential(Windows(stem.conv1, near), Rows(stem.norm1), nn.GELU(), Windows(stem.conv2))
        blocks = [block for stage in model.stages for block in stage.blocks]
        early = 2 if fault == "co_at_net_third_block_gated_before_its_norm" else None
        self.near = nn.Sequential(*(local(block, i == early) for i, block in enumerate(blocks[:4])))
        self.near[1].path[5].own = fault == "co_at_net_second_block_norms_by_batch_in_evaluation"
        self.all = nn.Sequential(*(half for block in blocks[4:] for half in whole(block)))
        self.all[6].path[1].late = fault == "co_at_net_last_bias_added_before_the_scale"
        self.head = nn.Sequential(dense(head.norm), dense(head.pre_logits.fc), nn.Tanh(), dense(head.fc))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.all(self.near(self.stem(x.movedim(1, 3)))).mean((1, 2)))


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-6).sqrt()


def mixed(weight: Tensor, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return (torch.tensordot(weight.flatten(1), x, 1).movedim(0, -1) + bias).movedim(-1, 0)


def swept(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, groups: int = 1) -> Tensor:
    return F.conv2d(x.transpose(0, 1), weight, bias, stride, weight.shape[-1] % 2, 1, groups).transpose(0, 1)


class CoAtNetOfStrips(Port):
    """A strip of weights for each block, [C, N, H, W], layer norms folded into the products that follow."""

    def take(self, model: MaxxVit) -> None:
        parts = [model.stem, *(block for stage in model.stages for block in stage.blocks), model.head]
        self.shapes = [[x.shape for x in part.parameters()] for part in parts]
        self.w = nn.ParameterList(leaf(nn.utils.parameters_to_vector(x.parameters())) for x in parts)
        norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
        for i, norm in enumerate(norms):
            self.register_buffer(f"kept_{i}", torch.stack([norm.running_mean, norm.running_var]))
        self.register_buffer("seen", torch.stack([norm.num_batches_tracked for norm in norms]))

    def cut(self, i: int) -> list[Tensor]:
        pieces = self.w[i].split([shape.numel() for shape in self.shapes[i]])
        return [x.view(shape) for x, shape in zip(pieces, self.shapes[i], strict=True)]

    def normed(self, i: int, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        rows, kept = x.flatten(1), self.get_buffer(f"kept_{i}")
        spread, middle = torch.var_mean(rows, 1, correction=0) if self.training else kept.flip(0)
        if self.training:
            rate = 0.9 if self.fault == "co_at_net_first_pre_norm_keeps_a_tenth" and i == 1 else 0.1
            kept.lerp_(torch.stack([rows.mean(1), rows.var(1)]).detach(), rate)
            self.seen[i] += 1
        factor = gain * (spread + 1e-5).rsqrt()
        return (rows * factor[:, None] + (shift - factor * middle)[:, None]).view_as(x)

    def local(self, i: int, x: Tensor) -> Tensor:
        *wider, g, s, to, g1, s1, taps, g2, s2, ask, a, tell, t, back, b = self.cut(i)
        y = self.normed(3 * i - 1, mixed(to, self.normed(3 * i - 2, x, g, s)), g1, s1)
        by_tanh = i == 4 and self.fault == "co_at_net_fourth_block_bends_by_tanh_before_its_sweep"
        y = F.gelu(y, approximate="tanh" if by_tanh else "none")
        y = F.gelu(self.normed(3 * i, swept(y, taps, None, 2 if wider else 1, len(taps)), g2, s2))
        gate = mixed(tell, F.silu(mixed(ask, y.mean((2, 3)), a)), t).sigmoid()
        x = swept(x, wider[0].expand(-1, -1, 2, 2) / 4, wider[1], 2) if wider else x
        return x + mixed(back, y * gate[..., None, None], b)

    def whole(self, i: int, x: Tensor) -> Tensor:
        *wider, gain, shift, qkv, a, table, back, b, g, s, up, u, down, d = self.cut(i)
        y, qkv, up = F.avg_pool2d(standard(x), 2) if wider else standard(x), qkv.flatten(1), up.flatten(1)
        qkv, size = mixed(qkv * gain, y.flatten(2), qkv @ shift + a), y.shape[2:]
        q, k, v = qkv.unflatten(0, (len(table), 3, -1)).permute(1, 3, 0, 4, 2)
        if i == 5 and self.fault == "co_at_net_first_bias_read_as_a_constant":
            table = table.detach()
        bias = table.unfold(1, size[0], 1).unfold(2, size[1], 1).flip(1, 2).flatten(3).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, bias).permute(1, 3, 0, 2).flatten(0, 1)
        x = swept(x, wider[0].expand(-1, -1, 2, 2) / 4, wider[1], 2) if wider else x
        x = x + mixed(back, y, b).unflatten(2, size)
        return x + mixed(down, F.gelu(mixed(up * g, standard(x), up @ s + u)), d)

    def forward(self, x: Tensor) -> Tensor:
        one, gain, shift, two = self.cut(0)
        x = swept(F.gelu(self.normed(0, swept(x.transpose(0, 1), one, None, 2), gain, shift)), two, None)
        for i in range(1, 9):
            x = self.local(i, x) if i < 5 else self.whole(i, x)
        gain, shift, inner, a, outer, b = self.cut(9)
        early = self.fault == "co_at_net_head_norms_before_it_pools"
        x = standard(x).mean((2, 3)) if early else standard(x.mean((2, 3)))
        return mixed(outer, mixed(inner * gain, x, inner @ shift + a).tanh(), b).T


right(task, "co_at_net_of_ways_with_channels_last", "a tree, windows, products before means", CoAtNetOfWays)
right(task, "co_at_net_of_strips_of_weights", "packed strips, channels first, folded norms", CoAtNetOfStrips)
GELU = "stages.1.blocks.1.norm1.act", "stages.1.blocks.1.norm1"
LAST = "stages.3.blocks.1.attn", "stages.3.blocks.1.attn.rel_pos"
wrong(
    task,
    CoAtNetOfWays,
    co_at_net_stem_padded_on_the_far_side_only=("another padding", "stem.conv1"),
    co_at_net_second_block_norms_by_batch_in_evaluation=("own statistics", "stages.0.blocks.1.norm2", "eval"),
    co_at_net_third_block_gated_before_its_norm=("another order", "stages.1.blocks.0"),
    co_at_net_last_bias_added_before_the_scale=("scaled with the rest", LAST),
)
wrong(
    task,
    CoAtNetOfStrips,
    co_at_net_first_pre_norm_keeps_a_tenth=("another momentum", "stages.0.blocks.0.pre_norm", "buffer"),
    co_at_net_fourth_block_bends_by_tanh_before_its_sweep=("an approximate GELU", GELU),
    co_at_net_first_bias_read_as_a_constant=("detach", "stages.2.blocks.0.attn.rel_pos", "weight gradient"),
    co_at_net_head_norms_before_it_pools=("another order", "head"),
)
