"""Two ports of a Swin Transformer: maps with the channels first, and windows by one gather of a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._ninth_swin import WINDOW, SwinTransformer, surprise, waves
from bench.held_back._sixth_ports import few

SPAN = 2 * WINDOW - 1
THIRD, FOURTH = "layers.1.blocks.0", "layers.1.blocks.1"
waving = few("ninth_swin", SwinTransformer, waves, surprise)


class Pointwise(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.kernel, self.offset = leaf(weight[:, :, None, None]), None if bias is None else leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, self.offset)


class ChannelNorm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor, eps: float = 1e-5):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(weight[:, None, None]), leaf(bias[:, None, None]), eps

    def forward(self, x: Tensor) -> Tensor:
        spread, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(spread + self.eps) * self.gain + self.offset


class Mixing(nn.Module):
    """What the places of one window tell each other; the move of the windows is inside."""

    def __init__(self, attn: nn.Module, move: int, fault: str):
        super().__init__()
        self.heads, self.move, self.fault = attn.heads, move, fault
        self.ask, self.offer, self.tell = map(Pointwise, attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3))
        self.close = Pointwise(attn.proj.weight, attn.proj.bias)
        self.table = leaf(attn.relative_position_bias_table.T.unflatten(1, (SPAN, SPAN)))

    def cut(self, x: Tensor, heads: int) -> Tensor:
        """[N, C, H, W] -> [N, windows, heads, places, channels of a head]."""
        x = x.unflatten(3, (-1, WINDOW)).unflatten(2, (-1, WINDOW)).unflatten(1, (heads, -1))
        return x.permute(0, 3, 5, 1, 4, 6, 2).flatten(4, 5).flatten(1, 2)

    def bias(self, high: int, wide: int) -> Tensor:
        """[windows, heads, places, places], endlessly low where two places were not neighbours."""
        place = torch.arange(WINDOW**2, device=self.table.device)
        down, across = (x[:, None] - x + WINDOW - 1 for x in (place // WINDOW, place % WINDOW))
        low, right = (torch.arange(n, device=place.device) >= n - self.move for n in (high, wide))
        side = 2 * low[:, None] + right
        if self.fault == "fourth_window_block_sees_columns_around_the_edge":
            side = low[:, None].expand(high, wide)
        side = self.cut(side[None, None], 1)[0, ..., 0]
        return self.table[:, down, across].masked_fill(side[..., None] != side[:, :, None], -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        high, wide = x.shape[2:]
        x = x.roll((-self.move, -self.move), (2, 3))
        q, k, v = (self.cut(part(x), self.heads) for part in (self.ask, self.offer, self.tell))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(high, wide))
        y = y.unflatten(3, (WINDOW, WINDOW)).unflatten(1, (high // WINDOW, wide // WINDOW))
        y = y.permute(0, 3, 6, 1, 4, 2, 5).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        return self.close(y).roll((self.move, self.move), (2, 3))


class Pair(nn.Module):
    """A mixing in whole windows and a feeding, each added to what it read."""

    def __init__(self, block: nn.Module, fault: str):
        super().__init__()
        self.fault, one, two, wide, narrow = fault, block.norm1, block.norm2, block.mlp.fc1, block.mlp.fc2
        self.first, self.second = ChannelNorm(one.weight, one.bias), ChannelNorm(two.weight, two.bias)
        if self.fault == "first_window_block_feeds_by_a_large_epsilon":
            self.second.eps = 1e-3
        self.mixing = Mixing(block.attn, block.shift_size, fault)
        self.widen, self.narrow = Pointwise(wide.weight, wide.bias), Pointwise(narrow.weight, narrow.bias)

    def forward(self, x: Tensor) -> Tensor:
        high, wide = x.shape[2:]
        room = 0, -wide % WINDOW, 0, -high % WINDOW
        early = self.fault == "third_window_block_pads_before_its_norm"
        y = self.first(F.pad(x, room)) if early else F.pad(self.first(x), room)
        x = x + self.mixing(y)[:, :, :high, :wide]
        return x + self.narrow(F.gelu(self.widen(self.second(x))))


class ChannelsFirst(Port):
    """A trunk of maps [N, C, H, W] without stages; the patches come by ``PixelUnshuffle``."""

    def take(self, model: SwinTransformer) -> None:
        embed, merge, last, fc = model.patch_embed, model.layers[1].downsample, model.norm, model.head.fc
        names = "first_window", "second_window", "third_window", "fourth_window"
        blocks = [block for layer in model.layers for block in layer.blocks]
        pairs = [*map(Pair, blocks, [self.fault if name in self.fault else "" for name in names])]
        self.trunk = nn.Sequential(
            nn.PixelUnshuffle(2),
            Pointwise(embed.proj.weight.flatten(1), embed.proj.bias),
            ChannelNorm(embed.norm.weight, embed.norm.bias),
            *pairs[:2],
            nn.PixelUnshuffle(2),
            ChannelNorm(self.resorted(merge.norm.weight), self.resorted(merge.norm.bias)),
            Pointwise(self.resorted(merge.reduction.weight)),
            *pairs[2:],
        )
        self.last, self.names = ChannelNorm(last.weight, last.bias), Pointwise(fc.weight, fc.bias)

    def resorted(self, weight: Tensor) -> Tensor:
        """From right, down, channel to channel, down, right."""
        four = weight.unflatten(-1, (2, 2, -1))
        if self.fault != "neighbouring_patches_merged_row_by_row":
            four = four.transpose(-3, -2)
        return four.movedim(-1, -3).flatten(-3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if self.fault == "patches_pooled_before_the_last_norm":
            return self.names(self.last(x.mean((2, 3), keepdim=True))).flatten(1)
        return self.names(self.last(x).mean((2, 3), keepdim=True)).flatten(1)


def normed(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], gain, shift)


class Gathered(Port):
    """A sequence [T, N, C]; one gather pads, moves and cuts it; the blocks of a stage in stacked weights."""

    def take(self, model: SwinTransformer) -> None:
        embed, tail = model.patch_embed, (model.layers[1].downsample, model.norm, model.head.fc)
        axes = (3, 2, 1, 0) if self.fault == "patch_kernel_across_its_diagonal" else (2, 3, 1, 0)
        self.kernel, self.lift = leaf(embed.proj.weight.permute(axes)), leaf(embed.proj.bias)
        self.ends = nn.ParameterList(leaf(w.t()) for part in (embed.norm, *tail) for w in part.parameters())
        self.heads = [layer.blocks[0].attn.heads for layer in model.layers]
        self.stages = nn.ModuleList()
        names = "g1", "s1", "bias", "qkv", "qkv_b", "out", "out_b", "g2", "s2", "up", "up_b", "down", "down_b"
        for layer in model.layers:
            same = zip(names, *map(nn.Module.parameters, layer.blocks), strict=True)
            self.stages.append(nn.ParameterDict({name: pile(w.t() for w in ws) for name, *ws in same}))

    def mixed(self, x: Tensor, w: dict[str, Tensor], high: int, wide: int, stage: int, move: int) -> Tensor:
        whole = [n + -n % WINDOW for n in (high, wide)]
        rows, columns = ((torch.arange(n, device=x.device) + move) % n for n in whole)
        rows, columns = rows.view(-1, 1, WINDOW, 1), columns.view(-1, 1, WINDOW)
        source = torch.where((rows < high) & (columns < wide), rows * wide + columns, high * wide)
        source, side = (g.flatten(2).flatten(0, 1) for g in (source, 2 * (rows < move) + (columns < move)))
        seen = F.pad(normed(x, w["g1"], w["s1"]), (0, 0, 0, 0, 0, 1))[source]
        q, k, v = (seen @ w["qkv"] + w["qkv_b"]).unflatten(3, (3, self.heads[stage], -1)).unbind(3)
        table = w["bias"].unflatten(1, (SPAN, SPAN))
        if self.fault == "last_moved_offsets_across_before_down" and stage == 1 and move:
            table = table.mT
        if self.fault == "first_moved_offsets_learn_nothing" and stage == 0 and move:
            table = table.detach()
        bias = table.unfold(1, WINDOW, 1).unfold(2, WINDOW, 1).flip(3, 4).flatten(3).flatten(1, 2)
        scores = torch.einsum("wqnhd,wknhd->wnhqk", q, k) * q.shape[-1] ** -0.5 + bias
        scores = scores.masked_fill((side[:, :, None] != side[:, None])[:, None, None], -torch.inf)
        y = torch.einsum("wnhqk,wknhd->wqnhd", scores.softmax(4), v).flatten(3).flatten(0, 1)
        return y[source.flatten().argsort()[: high * wide]] @ w["out"] + w["out_b"]

    def forward(self, x: Tensor) -> Tensor:
        gain, shift, four_gain, four_shift, join, last_gain, last_shift, names, names_b = self.ends
        x = torch.einsum("nchwij,ijco->hwno", x.unfold(2, 2, 2).unfold(3, 2, 2), self.kernel) + self.lift
        (high, wide), x = x.shape[:2], normed(x.flatten(0, 1), gain, shift)
        for stage, stacks in enumerate(self.stages):
            if stage:
                high, wide = high // 2, wide // 2
                four = x.unflatten(0, (high, 2, wide, 2)).permute(0, 2, 4, 3, 1, 5).flatten(3).flatten(0, 1)
                x = normed(four, four_gain, four_shift) @ join
            for i, move in enumerate((0, WINDOW // 2)):
                w = {name: stack[i] for name, stack in stacks.items()}
                x = x + self.mixed(x, w, high, wide, stage, move)
                y = F.gelu(normed(x, w["g2"], w["s2"]) @ w["up"] + w["up_b"])
                x = x + y @ w["down"] + w["down_b"]
        return normed(x, last_gain, last_shift).mean(0) @ names + names_b


right(waving, "swin_with_channels_first", "channels last as channels first", ChannelsFirst)
right(waving, "swin_windows_by_one_gather", "modules as one sequence with gathers", Gathered)
wrong(
    waving,
    ChannelsFirst,
    first_window_block_feeds_by_a_large_epsilon=("another epsilon", "layers.0.blocks.0.norm2"),
    neighbouring_patches_merged_row_by_row=("wrong order of channels", "layers.1.downsample"),
    third_window_block_pads_before_its_norm=("padding too early", (THIRD, f"{THIRD}.norm1")),
    fourth_window_block_sees_columns_around_the_edge=("half a mask missing", (FOURTH, f"{FOURTH}.attn")),
    patches_pooled_before_the_last_norm=("two steps in the wrong order", ("norm", "head.global_pool")),
)
wrong(
    waving,
    Gathered,
    patch_kernel_across_its_diagonal=("two axes of a weight swapped", "patch_embed.proj"),
    first_moved_offsets_learn_nothing=("a detach too many", "layers.0.blocks.1.attn", ("weight gradient",)),
    last_moved_offsets_across_before_down=("axes of a table swapped", f"{FOURTH}.attn"),
)
